// SPDX-License-Identifier: BSD-3-Clause
#include <fcntl.h>
#include <gtest/gtest.h>
#include <hdf5.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <bit>
#include <cstdlib>
#include <cstring>
#include <linattn/io/reader.hpp>
#include <thread>

#include "io_support.hpp"

namespace {

using namespace LinAttn::io;
using namespace LinAttn::test_support;
using LinAttn::EnvironmentFailure;
using LinAttn::InvalidArgument;

class ReaderTest : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  std::filesystem::path file = folder / "file.h5";

  std::string refusal(const std::string& dataset, const ReadLimits& limits = {}) {
    return message_of<InvalidArgument>([&] { Reader(file, limits).read(dataset); });
  }
  std::string in_file(const std::string& text) { return file.string() + ": " + text; }
};

// ---- opening ----

TEST_F(ReaderTest, SaysWhyAFileCannotBeOpened) {
  const auto environment = [](const std::filesystem::path& path) {
    return message_of<EnvironmentFailure>([&] { Reader reader(path); });
  };
  EXPECT_EQ(environment(file), in_file("cannot be opened: No such file or directory"));
  write_bytes(file, "text");
  EXPECT_EQ(environment(file / "below.h5"),
            (file / "below.h5").string() + ": cannot be opened: Not a directory");
  EXPECT_EQ(environment(folder / ""),
            (folder / "").string() + ": expected an HDF5 file, found a directory");
  const auto pipe = folder / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_EQ(environment(pipe),
            pipe.string() + ": expected an HDF5 file, found something that is not a regular file");
  if (geteuid() != 0) {  // root reads everything
    std::filesystem::permissions(file, std::filesystem::perms::none);
    EXPECT_EQ(environment(file), in_file("cannot be opened: Permission denied"));
  }
}

TEST_F(ReaderTest, SaysThatAFileIsNotHdf5) {
  write_bytes(file, "");
  EXPECT_EQ(message_of<InvalidArgument>([&] { Reader reader(file); }),
            in_file("expected an HDF5 file, found an empty file"));
  write_bytes(file, std::string(5000, 'x'));
  EXPECT_EQ(message_of<InvalidArgument>([&] { Reader reader(file); }),
            in_file("expected an HDF5 file, found one without the HDF5 signature"));
  EXPECT_NE(message_of<InvalidArgument>([] { Reader reader(""); }).find("empty name"),
            std::string::npos);
}

TEST_F(ReaderTest, AControlCharacterInANameStaysOutOfTheMessage) {
  const auto name = folder / "two\nlines.h5";
  EXPECT_NE(message_of<EnvironmentFailure>([&] { Reader reader(name); }).find("two lines.h5"),
            std::string::npos);
}

TEST_F(ReaderTest, ATruncatedFileIsRefusedWhereverItEnds) {
  {
    RawFile raw(file);
    raw.ramp("/inputs/q", {2, 3, 50, 7});
    raw.text("/", "schema", "linattn-1");
  }
  const std::string whole = bytes_of(file);
  ASSERT_GT(whole.size(), 2100u * 8);
  for (const std::size_t length :
       {std::size_t{1}, std::size_t{7}, std::size_t{8}, std::size_t{20}, std::size_t{95},
        std::size_t{96}, std::size_t{500}, std::size_t{2048}, whole.size() / 2, whole.size() - 1}) {
    write_bytes(file, whole.substr(0, length));
    const std::string message = message_of<InvalidArgument>([&] {
      Reader reader(file);
      reader.read("/inputs/q");
    });
    EXPECT_EQ(message.find(file.string()), 0u) << length;
    EXPECT_NE(message.find(length < 8 ? "without the HDF5 signature" : "damaged or truncated"),
              std::string::npos)
        << length << ": " << message;
  }
  write_bytes(file, whole);
  EXPECT_EQ(Reader(file).read("/inputs/q").size(), 2100);
}

TEST_F(ReaderTest, ReadsBehindAUserBlock) {
  const hid_t creation = H5Pcreate(H5P_FILE_CREATE);
  H5Pset_userblock(creation, 1024);
  const hid_t raw = checked(H5Fcreate(file.c_str(), H5F_ACC_TRUNC, creation, H5P_DEFAULT));
  H5Gclose(checked(H5Gcreate2(raw, "inputs", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT)));
  H5Fclose(raw);
  H5Pclose(creation);
  EXPECT_EQ(Reader(file).kind("/inputs"), ObjectKind::group);
}

TEST_F(ReaderTest, TwoReadersAndAReadOnlyFolder) {
  { RawFile(file).ramp("/x", {3}); }
  std::filesystem::permissions(file, std::filesystem::perms::owner_read);
  const Reader first(file);
  const Reader second(file);
  EXPECT_EQ(first.read("/x").as<double>(), second.read("/x").as<double>());
}

TEST_F(ReaderTest, ALockOfAnotherWriterIsNamedWithTheWayOut) {
  if (std::getenv("HDF5_USE_FILE_LOCKING") != nullptr) GTEST_SKIP() << "locking is chosen outside";
  { RawFile(file).ramp("/x", {3}); }
  const int descriptor = ::open(file.c_str(), O_RDWR);
  ASSERT_GE(descriptor, 0);
  ASSERT_EQ(flock(descriptor, LOCK_EX | LOCK_NB), 0);
  const std::string message = message_of<EnvironmentFailure>([&] { Reader reader(file); });
  ::close(descriptor);
  EXPECT_NE(message.find("another process has it open for writing"), std::string::npos) << message;
  EXPECT_NE(message.find("HDF5_USE_FILE_LOCKING"), std::string::npos) << message;
  EXPECT_EQ(Reader(file).read("/x").size(), 3);
}

// ---- HDF5's error printing ----

herr_t count_call(hid_t, void* data) {
  ++*static_cast<int*>(data);
  return 0;
}

TEST_F(ReaderTest, TheCallersErrorHandlerIsUnusedAndKept) {
  write_bytes(file, std::string("\x89HDF\r\n\x1a\n", 8));
  H5E_auto2_t before = nullptr;
  void* before_data = nullptr;
  H5Eget_auto2(H5E_DEFAULT, &before, &before_data);
  int calls = 0;
  H5Eset_auto2(H5E_DEFAULT, count_call, &calls);
  message_of<InvalidArgument>([&] { Reader reader(file); });
  EXPECT_EQ(calls, 0);
  EXPECT_LT(H5Fopen("/nonexistent/file", H5F_ACC_RDONLY, H5P_DEFAULT), 0);
  EXPECT_EQ(calls, 1);
  H5Eset_auto2(H5E_DEFAULT, before, before_data);
}

#ifndef H5_NO_DEPRECATED_SYMBOLS
herr_t count_call_v1(void* data) {
  ++*static_cast<int*>(data);
  return 0;
}

TEST_F(ReaderTest, AnErrorHandlerOfTheOldKindIsKeptToo) {
  H5E_auto2_t before = nullptr;
  void* before_data = nullptr;
  H5Eget_auto2(H5E_DEFAULT, &before, &before_data);
  int calls = 0;
  H5Eset_auto1(count_call_v1, &calls);
  write_bytes(file, std::string("\x89HDF\r\n\x1a\n", 8));
  message_of<InvalidArgument>([&] { Reader reader(file); });
  EXPECT_EQ(calls, 0);
  EXPECT_LT(H5Fopen("/nonexistent/file", H5F_ACC_RDONLY, H5P_DEFAULT), 0);
  EXPECT_EQ(calls, 1);
  H5Eset_auto2(H5E_DEFAULT, before, before_data);
}
#endif

TEST_F(ReaderTest, NothingStaysOpen) {
  { RawFile(file).ramp("/inputs/q", {3}); }
  {
    Reader reader(file);
    reader.read("/inputs/q");
    reader.children("/");
    reader.attribute_names("/inputs");
    message_of<InvalidArgument>([&] { reader.read("/inputs"); });
    message_of<InvalidArgument>([&] { reader.attribute("/inputs", "none"); });
    message_of<InvalidArgument>([&] { reader.kind("/inputs/q/deeper"); });
  }
  EXPECT_EQ(H5Fget_obj_count(H5F_OBJ_ALL, H5F_OBJ_ALL), 0);
}

TEST_F(ReaderTest, ThreadsTakeTurns) {
  { RawFile(file).ramp("/x", {1000}); }
  std::vector<std::thread> threads;
  std::vector<double> sums(4);
  for (std::size_t t = 0; t < sums.size(); ++t)
    threads.emplace_back([&, t] {
      for (int repeat = 0; repeat < 20; ++repeat)
        for (const double x : Reader(file).read("/x").as<double>()) sums[t] += x;
    });
  for (std::thread& thread : threads) thread.join();
  for (const double sum : sums) EXPECT_EQ(sum, 20 * 500000.0);
}

// ---- attributes ----

struct StringForm {
  bool variable;
  H5T_cset_t charset;
  H5T_str_t padding;
  std::string text;
};

void PrintTo(const StringForm& form, std::ostream* stream) {
  *stream << (form.variable ? "variable " : "fixed ")
          << (form.charset == H5T_CSET_UTF8 ? "utf8 " : "ascii ")
          << (form.padding == H5T_STR_NULLTERM  ? "nullterm"
              : form.padding == H5T_STR_NULLPAD ? "nullpad"
                                                : "spacepad")
          << " '" << form.text << "'";
}

std::vector<StringForm> string_forms() {
  std::vector<StringForm> forms;
  for (const bool variable : {false, true})
    for (const H5T_cset_t charset : {H5T_CSET_ASCII, H5T_CSET_UTF8})
      for (const H5T_str_t padding : {H5T_STR_NULLTERM, H5T_STR_NULLPAD, H5T_STR_SPACEPAD})
        for (const char* text : {"elu", "", "two words", "\xc3\xa9t\xc3\xa9 \xce\xb1"})
          forms.push_back({variable, charset, padding, text});
  return forms;
}

class StringAttribute : public ::testing::TestWithParam<StringForm> {
 protected:
  TemporaryFolder folder;
};

TEST_P(StringAttribute, ReadsAlike) {
  const StringForm& form = GetParam();
  const auto file = folder / "file.h5";
  const hid_t type = checked(H5Tcopy(H5T_C_S1));
  H5Tset_cset(type, form.charset);
  H5Tset_strpad(type, form.padding);
  {
    RawFile raw(file);
    if (form.variable) {
      H5Tset_size(type, H5T_VARIABLE);
      const char* text = form.text.c_str();
      raw.attribute("/", "scalar", type, &text);
      raw.attribute("/", "array", type, &text, {1});
    } else {
      for (const std::size_t room : {0, 6}) {
        std::string stored = form.text;
        // A terminated string needs its terminator, a padded one may fill the field.
        stored.resize(std::max<std::size_t>(
                          1, stored.size() + room + (form.padding == H5T_STR_NULLTERM ? 1 : 0)),
                      form.padding == H5T_STR_SPACEPAD ? ' ' : '\0');
        H5Tset_size(type, stored.size());
        raw.attribute("/", room == 0 ? "scalar" : "scalar_with_room", type, stored.c_str());
        raw.attribute("/", room == 0 ? "array" : "array_with_room", type, stored.c_str(), {1});
      }
    }
  }
  H5Tclose(type);
  const Reader reader(file);
  const auto names = reader.attribute_names("/");
  EXPECT_EQ(names.size(), form.variable ? 2u : 4u);
  for (const std::string& name : names)
    EXPECT_EQ(reader.attribute("/", name), Value(form.text)) << name;
}

INSTANTIATE_TEST_SUITE_P(AllForms, StringAttribute, ::testing::ValuesIn(string_forms()));

TEST_F(ReaderTest, StringsWithoutAPlaceForTheirEnd) {
  {
    RawFile raw(file);
    const hid_t type = checked(H5Tcopy(H5T_C_S1));
    H5Tset_size(type, 3);
    raw.attribute("/", "unterminated", type, "elu");
    raw.attribute("/", "empty", type, nullptr);
    H5Tset_size(type, H5T_VARIABLE);
    const char* nothing = nullptr;
    raw.attribute("/", "null_pointer", type, &nothing);
    H5Tclose(type);
  }
  const Reader reader(file);
  EXPECT_EQ(reader.attribute("/", "unterminated"), Value("elu"));
  EXPECT_EQ(reader.attribute("/", "empty"), Value(""));
  EXPECT_EQ(reader.attribute("/", "null_pointer"), Value(""));
}

template <class T>
void add_number(RawFile& raw, const char* name, hid_t stored, hid_t memory, T value) {
  const hid_t space = H5Screate(H5S_SCALAR);
  const hid_t root = H5Gopen2(raw.id(), "/", H5P_DEFAULT);
  const hid_t made = checked(H5Acreate2(root, name, stored, space, H5P_DEFAULT, H5P_DEFAULT));
  checked(H5Awrite(made, memory, &value));
  H5Aclose(made);
  H5Gclose(root);
  H5Sclose(space);
}

TEST_F(ReaderTest, NumbersOfEveryWidthAndByteOrder) {
  {
    RawFile raw(file);
    add_number<std::int64_t>(raw, "i8", H5T_STD_I8LE, H5T_NATIVE_INT64, -7);
    add_number<std::int64_t>(raw, "i16be", H5T_STD_I16BE, H5T_NATIVE_INT64, -700);
    add_number<std::int64_t>(raw, "i32be", H5T_STD_I32BE, H5T_NATIVE_INT64, -70000);
    add_number<std::int64_t>(raw, "i64be", H5T_STD_I64BE, H5T_NATIVE_INT64, -7000000000);
    add_number<std::uint64_t>(raw, "u16be", H5T_STD_U16BE, H5T_NATIVE_UINT64, 65535);
    add_number<std::uint64_t>(raw, "u64", H5T_STD_U64LE, H5T_NATIVE_UINT64, ~std::uint64_t{0});
    add_number<double>(raw, "f32be", H5T_IEEE_F32BE, H5T_NATIVE_DOUBLE, -0.375);
    add_number<double>(raw, "f64be", H5T_IEEE_F64BE, H5T_NATIVE_DOUBLE, 0.1);
    const hid_t half = make_half_type(H5T_ORDER_BE);
    add_number<double>(raw, "f16be", half, H5T_NATIVE_DOUBLE, 1.5);
    H5Tclose(half);
    const double one = 2.5;
    raw.attribute("/", "array", H5T_NATIVE_DOUBLE, &one, {1, 1});
  }
  const Reader reader(file);
  const auto value = [&](const char* name) { return reader.attribute("/", name); };
  EXPECT_EQ(value("i8"), Value(-7));
  EXPECT_EQ(value("i16be"), Value(-700));
  EXPECT_EQ(value("i32be"), Value(-70000));
  EXPECT_EQ(value("i64be"), Value(-7000000000));
  EXPECT_EQ(value("u16be"), Value(65535));
  EXPECT_EQ(value("u64"), Value(~std::uint64_t{0}));
  EXPECT_EQ(value("f32be"), Value(-0.375));
  EXPECT_EQ(value("f64be"), Value(0.1));
  EXPECT_EQ(value("f16be"), Value(1.5));
  EXPECT_EQ(value("array"), Value(2.5));
}

TEST_F(ReaderTest, BooleansAsOtherToolsWriteThem) {
  {
    RawFile raw(file);
    for (const hid_t base : {H5T_STD_I8LE, H5T_STD_I32BE}) {
      const hid_t type = checked(H5Tenum_create(base));
      for (const std::int64_t value : {0, 1}) {
        std::int64_t converted = value;
        H5Tconvert(H5T_NATIVE_INT64, base, 1, &converted, nullptr, H5P_DEFAULT);
        H5Tenum_insert(type, value != 0 ? "TRUE" : "FALSE", &converted);
        const std::string name = (base == H5T_STD_I8LE ? "i8_" : "i32be_") + std::to_string(value);
        raw.attribute("/", name, type, &converted);
      }
      H5Tclose(type);
    }
  }
  const Reader reader(file);
  for (const char* base : {"i8_", "i32be_"})
    for (const int value : {0, 1})
      EXPECT_EQ(reader.attribute("/", base + std::to_string(value)), Value(value)) << base;
}

TEST_F(ReaderTest, RefusesAttributesThatAreNotOneValue) {
  {
    RawFile raw(file);
    const double values[] = {1, 2};
    raw.attribute("/", "array", H5T_NATIVE_DOUBLE, values, {2});
    raw.attribute("/", "null", H5T_NATIVE_DOUBLE, nullptr);
    const hid_t compound = checked(H5Tcreate(H5T_COMPOUND, 8));
    H5Tinsert(compound, "x", 0, H5T_NATIVE_DOUBLE);
    raw.attribute("/", "compound", compound, values);
    H5Tclose(compound);
  }
  const Reader reader(file);
  const auto message = [&](const char* name) {
    return message_of<InvalidArgument>([&] { reader.attribute("/", name); });
  };
  EXPECT_EQ(message("array"),
            in_file("attribute 'array' of /: expected one value, found an array of values"));
  EXPECT_EQ(message("null"),
            in_file("attribute 'null' of /: expected one value, found an array of values"));
  EXPECT_EQ(message("compound"),
            in_file("attribute 'compound' of /: expected a number or a string, found compound"));
  EXPECT_EQ(message("absent"), in_file("attribute 'absent' of /: expected a value, found nothing"));
}

// ---- datasets ----

TEST_F(ReaderTest, BigEndianComesInNativeOrder) {
  const std::vector<double> expected = {0.5, 1.5, 2.5, 3.5, 4.5, 5.5};
  {
    RawFile raw(file);
    raw.ramp("/f64", {2, 3}, H5T_IEEE_F64BE);
    raw.ramp("/f32", {2, 3}, H5T_IEEE_F32BE);
    const std::int64_t integers[] = {1, -2, 1000000000000};
    raw.dataset("/i64", H5T_STD_I64BE, {3}, H5T_NATIVE_INT64, integers);
    raw.dataset("/u32", H5T_STD_I32BE, {2}, H5T_NATIVE_INT64, integers);
  }
  const Reader reader(file);
  EXPECT_EQ(reader.read("/f64").type(), ElementType::f64);
  EXPECT_EQ(reader.read("/f64").extents(), (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(reader.read("/f64").as<double>(), expected);
  EXPECT_EQ(reader.read("/f32").type(), ElementType::f32);
  EXPECT_EQ(reader.read("/f32").as<double>(), expected);
  EXPECT_EQ(reader.read("/i64").as<std::int64_t>(),
            (std::vector<std::int64_t>{1, -2, 1000000000000}));
  EXPECT_EQ(reader.read("/u32").as<std::int64_t>(), (std::vector<std::int64_t>{1, -2}));
  EXPECT_EQ(reader.describe("/u32").type, "int32");
  EXPECT_FALSE(reader.describe("/u32").exact);
}

TEST_F(ReaderTest, HalfPrecisionKeepsEveryBit) {
  std::vector<std::uint16_t> bits(0x10000);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint16_t>(i);
  std::vector<unsigned char> little, big;
  for (const std::uint16_t x : bits) {
    little.insert(little.end(),
                  {static_cast<unsigned char>(x & 0xff), static_cast<unsigned char>(x >> 8)});
    big.insert(big.end(),
               {static_cast<unsigned char>(x >> 8), static_cast<unsigned char>(x & 0xff)});
  }
  {
    RawFile raw(file);
    for (const H5T_order_t order : {H5T_ORDER_LE, H5T_ORDER_BE}) {
      const hid_t type = make_half_type(order);
      raw.raw(order == H5T_ORDER_LE ? "/little" : "/big", type, {256, 256},
              order == H5T_ORDER_LE ? little.data() : big.data());
      H5Tclose(type);
    }
  }
  const Reader reader(file);
  for (const char* name : {"/little", "/big"}) {
    const Array array = reader.read(name);
    ASSERT_EQ(array.type(), ElementType::f16);
    EXPECT_EQ(std::memcmp(array.data(), bits.data(), array.size_bytes()), 0) << name;
    const std::vector<float> values = array.as<float>();
    for (std::size_t i = 0; i < bits.size(); ++i)
      ASSERT_EQ(
          std::bit_cast<std::uint32_t>(values[i]),
          std::bit_cast<std::uint32_t>(static_cast<float>(LinAttn::float16::from_bits(bits[i]))))
          << name << " " << i;
  }
}

TEST_F(ReaderTest, EmptyExtentsAndScalars) {
  {
    RawFile raw(file);
    raw.ramp("/empty", {2, 0, 5});
    raw.ramp("/scalar", {});
  }
  const Reader reader(file);
  EXPECT_EQ(reader.read("/empty").extents(), (std::vector<std::int64_t>{2, 0, 5}));
  EXPECT_EQ(reader.read("/empty").size(), 0);
  EXPECT_EQ(reader.read("/scalar").rank(), 0);
  EXPECT_EQ(reader.read("/scalar").as<double>(), std::vector<double>{0.5});
}

TEST_F(ReaderTest, ChunkedAndCompressedData) {
  const hid_t creation = H5Pcreate(H5P_DATASET_CREATE);
  const hsize_t chunk[] = {3, 4};
  H5Pset_chunk(creation, 2, chunk);
  H5Pset_deflate(creation, 4);
  std::vector<double> values(70);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.1 * static_cast<double>(i);
  {
    RawFile(file).dataset("/x", H5T_IEEE_F64BE, {7, 10}, H5T_NATIVE_DOUBLE, values.data(),
                          creation);
  }
  H5Pclose(creation);
  EXPECT_EQ(Reader(file).read("/x").as<double>(), values);
}

TEST_F(ReaderTest, ADatasetNeverWrittenHoldsItsFillValue) {
  { RawFile(file).dataset("/x", H5T_IEEE_F64LE, {4}, H5T_NATIVE_DOUBLE, nullptr); }
  EXPECT_EQ(Reader(file).read("/x").as<double>(), std::vector<double>(4, 0.0));
}

TEST_F(ReaderTest, NamesTheTypeItCannotRead) {
  {
    RawFile raw(file);
    const hid_t bfloat = checked(H5Tcopy(H5T_IEEE_F32LE));
    H5Tset_fields(bfloat, 15, 7, 8, 0, 7);
    H5Tset_size(bfloat, 2);
    H5Tset_ebias(bfloat, 127);
    const std::uint16_t bits = 0x3f80;
    raw.raw("/bfloat16", bfloat, {1}, &bits);
    H5Tclose(bfloat);
    const std::uint64_t count = 3;
    raw.raw("/u64", H5T_NATIVE_UINT64, {1}, &count);
    const hid_t text = checked(H5Tcopy(H5T_C_S1));
    raw.raw("/text", text, {1}, "x");
    H5Tclose(text);
    const long double wide = 1;
    raw.raw("/wide", H5T_NATIVE_LDOUBLE, {1}, &wide);
    const hid_t space = H5Screate(H5S_NULL);
    H5Dclose(checked(H5Dcreate2(raw.id(), "null", H5T_NATIVE_DOUBLE, space, H5P_DEFAULT,
                                H5P_DEFAULT, H5P_DEFAULT)));
    H5Sclose(space);
    raw.group("/group");
  }
  const std::string expected = "expected float16, float32, float64, uint8 or int64, found ";
  EXPECT_EQ(refusal("/bfloat16"),
            in_file("/bfloat16: " + expected +
                    "a 16-bit floating-point type with 8 exponent and 7 fraction bits"));
  EXPECT_EQ(refusal("/u64"), in_file("/u64: " + expected + "uint64"));
  EXPECT_EQ(refusal("/text"), in_file("/text: " + expected + "string"));
  EXPECT_EQ(refusal("/wide").find(in_file("/wide: " + expected + "a ")), 0u);
  EXPECT_EQ(refusal("/null"), in_file("/null: expected elements, found a null data space"));
  EXPECT_EQ(refusal("/group"), in_file("/group: expected a dataset, found a group"));
  EXPECT_EQ(refusal("/nothing"), in_file("/nothing: expected a dataset, found nothing"));
  EXPECT_EQ(refusal("/u64/x"), in_file("/u64: expected a group, found a dataset"));
  EXPECT_EQ(message_of<InvalidArgument>([&] { Reader(file).children("/u64"); }),
            in_file("/u64: expected a group, found a dataset"));
}

// ---- what leaves the file or goes in circles ----

TEST_F(ReaderTest, LinksStayInsideTheFile) {
  const auto other = folder / "other.h5";
  { RawFile(other).ramp("/q", {3}); }
  {
    RawFile raw(file);
    raw.ramp("/data", {3});
    H5Lcreate_external(other.c_str(), "/q", raw.id(), "external", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/external", raw.id(), "soft_to_external", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/data", raw.id(), "soft", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/nowhere", raw.id(), "dangling", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/loop_b", raw.id(), "loop_a", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/loop_a", raw.id(), "loop_b", H5P_DEFAULT, H5P_DEFAULT);
    raw.group("/circle");
    H5Lcreate_hard(raw.id(), "/circle", raw.id(), "/circle/again", H5P_DEFAULT, H5P_DEFAULT);
  }
  const Reader reader(file);
  EXPECT_EQ(reader.read("/soft").size(), 3);
  EXPECT_EQ(reader.kind("/circle/again/again"), ObjectKind::group);
  EXPECT_EQ(reader.children("/circle"), std::vector<std::string>{"again"});
  EXPECT_EQ(refusal("/external"), in_file("/external: expected an object of this file, found an "
                                          "external link, which is not followed"));
  for (const char* name : {"/soft_to_external", "/dangling", "/loop_a"})
    EXPECT_EQ(
        refusal(name).find(in_file(std::string(name) +
                                   ": expected an object, found a soft link that leads nowhere")),
        0u)
        << refusal(name);
}

TEST_F(ReaderTest, DataOfOtherFilesIsNotRead) {
  const auto secret = folder / "secret";
  write_bytes(secret, std::string(64, 's'));
  const auto other = folder / "other.h5";
  { RawFile(other).ramp("/x", {8}); }
  {
    RawFile raw(file);
    const hid_t external = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_external(external, secret.c_str(), 0, 64);
    raw.dataset("/external", H5T_IEEE_F64LE, {8}, H5T_NATIVE_DOUBLE, nullptr, external);
    H5Pclose(external);
    const hid_t mapped = H5Pcreate(H5P_DATASET_CREATE);
    const hsize_t extent = 8;
    const hid_t space = H5Screate_simple(1, &extent, nullptr);
    H5Pset_virtual(mapped, space, other.c_str(), "/x", space);
    raw.dataset("/virtual", H5T_IEEE_F64LE, {8}, H5T_NATIVE_DOUBLE, nullptr, mapped);
    H5Sclose(space);
    H5Pclose(mapped);
  }
  for (const char* name : {"/external", "/virtual"})
    EXPECT_EQ(refusal(name),
              in_file(std::string(name) +
                      ": expected data of this file, found a reference to other files, "
                      "which is not followed"));
}

// ---- sizes that only the file claims ----

TEST_F(ReaderTest, HugeClaimsAreRefusedBeforeAnyAllocation) {
  const hid_t chunked = H5Pcreate(H5P_DATASET_CREATE);
  const hsize_t chunk[] = {16, 16};
  H5Pset_chunk(chunked, 2, chunk);
  const hsize_t big = hsize_t{1} << 33;
  {
    RawFile raw(file);
    // HDF5 itself refuses contiguous extents beyond 63 bits.
    raw.dataset("/overflow", H5T_IEEE_F64LE, {big, big}, H5T_NATIVE_DOUBLE, nullptr, chunked);
    raw.dataset("/claim", H5T_IEEE_F64LE, {20000, 20000}, H5T_NATIVE_DOUBLE, nullptr, chunked);
    raw.dataset("/unwritten", H5T_IEEE_F64LE, {20000, 20000}, H5T_NATIVE_DOUBLE, nullptr);
    raw.dataset("/larger", H5T_IEEE_F64LE, {big, 1024}, H5T_NATIVE_DOUBLE, nullptr, chunked);
    raw.ramp("/small", {1000});
  }
  H5Pclose(chunked);
  EXPECT_EQ(
      refusal("/overflow"),
      in_file("/overflow: extents (8589934592, 8589934592) of float64 are more elements than 63 "
              "bits can count"));
  EXPECT_EQ(refusal("/larger").find(
                in_file("/larger: extents (8589934592, 1024) of float64 exceed the limit of ")),
            0u);
  for (const char* name : {"/claim", "/unwritten"})
    EXPECT_EQ(refusal(name),
              in_file(std::string(name) +
                      ": extents (20000, 20000) of float64 need 3200000000 bytes, the "
                      "file stores 0, which is too little to be believed"));
  EXPECT_EQ(
      refusal("/small", {.total_bytes = 7999}),
      in_file("/small: extents (1000) of float64 exceed the limit of 7999 bytes for one file"));
  const Reader reader(file, {.total_bytes = 10000});
  EXPECT_EQ(reader.read("/small").size(), 1000);
  EXPECT_NE(
      message_of<InvalidArgument>([&] { reader.read("/small"); }).find("exceed the limit of 10000"),
      std::string::npos);
}

}  // namespace
