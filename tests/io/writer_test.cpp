// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>
#include <hdf5.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <limits>
#include <linattn/io/reader.hpp>
#include <linattn/io/writer.hpp>
#include <numeric>

#include "io_support.hpp"

namespace {

using namespace LinAttn::io;
using namespace LinAttn::test_support;
using LinAttn::EnvironmentFailure;
using LinAttn::InvalidArgument;

class WriterTest : public ::testing::Test {
 protected:
  TemporaryFolder folder;
  std::filesystem::path file = folder / "out.h5";

  std::string in_file(const std::string& text) { return file.string() + ": " + text; }

  /// Reads a dataset with the C interface, in the type given.
  template <class T>
  std::vector<T> raw_read(const std::string& dataset, hid_t memory) {
    const hid_t id = checked(H5Fopen(file.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT));
    const hid_t set = checked(H5Dopen2(id, dataset.c_str(), H5P_DEFAULT));
    const hid_t space = H5Dget_space(set);
    std::vector<T> values(static_cast<std::size_t>(H5Sget_simple_extent_npoints(space)));
    checked(H5Dread(set, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, values.data()));
    H5Sclose(space);
    H5Dclose(set);
    H5Fclose(id);
    return values;
  }
};

TEST_F(WriterTest, RoundTripOfEveryType) {
  const std::vector<double> reals = {0.1,    -2, 1e300, std::numeric_limits<double>::infinity(),
                                     5e-324, 0};
  const std::vector<float> singles = {0.1f, -2, 1e30f, 7, 1e-45f, 0};
  const std::vector<std::uint8_t> bytes = {0, 1, 255, 3, 4, 5};
  const std::vector<std::int64_t> integers = {0, -1, INT64_MAX, INT64_MIN, 4, 5};
  Array half(ElementType::f16, {2, 3});
  const std::uint16_t bits[] = {0x3c00, 0x7c01, 0xfe55, 0x0001, 0xfc00, 0x8000};
  std::memcpy(half.data(), bits, sizeof bits);
  {
    Writer writer(file);
    writer.write("/f64", reals, {2, 3});
    writer.write("/deep/er/f32", singles, {3, 2});
    writer.write("/deep/u8", bytes, {6});
    writer.write("/i64", integers, {1, 6, 1});
    writer.write("/f16", half);
    writer.write("/empty", std::vector<double>{}, {2, 0, 3});
    writer.write("/scalar", std::vector<double>{2.5}, {});
    writer.commit();
  }
  EXPECT_EQ(raw_read<double>("/f64", H5T_NATIVE_DOUBLE), reals);
  EXPECT_EQ(raw_read<float>("/deep/er/f32", H5T_NATIVE_FLOAT), singles);
  EXPECT_EQ(raw_read<std::uint8_t>("/deep/u8", H5T_NATIVE_UINT8), bytes);
  EXPECT_EQ(raw_read<std::int64_t>("/i64", H5T_NATIVE_INT64), integers);
  const Reader reader(file);
  EXPECT_EQ(reader.describe("/f64").type, "float64");
  EXPECT_EQ(reader.describe("/deep/er/f32").type, "float32");
  EXPECT_EQ(reader.describe("/f16").type, "float16");
  EXPECT_EQ(reader.describe("/i64").extents, (std::vector<std::int64_t>{1, 6, 1}));
  EXPECT_EQ(std::memcmp(reader.read("/f16").data(), bits, sizeof bits), 0);
  EXPECT_EQ(reader.read("/empty").extents(), (std::vector<std::int64_t>{2, 0, 3}));
  EXPECT_EQ(reader.read("/scalar").as<double>(), std::vector<double>{2.5});
  EXPECT_EQ(reader.attribute("/", "schema"), Value("linattn-1"));
}

TEST_F(WriterTest, AttributesOfEveryKindAndTheirReplacement) {
  {
    Writer writer(file);
    writer.write("/x", std::vector<double>{1}, {1});
    writer.attribute("/config", "causal", 1);
    writer.attribute("/config", "scale", 0.1);
    writer.attribute("/config", "scale", -0.5);
    writer.attribute("/config", "seed", std::numeric_limits<std::uint64_t>::max());
    writer.attribute("/x", "unit", "\xce\xb1 per row");
    writer.attribute("/", "producer", "");
    writer.attribute("/", "producer", std::string("test"));
    writer.commit();
  }
  const Reader reader(file);
  EXPECT_EQ(reader.attribute("/config", "causal"), Value(1));
  EXPECT_EQ(reader.attribute("/config", "scale"), Value(-0.5));
  EXPECT_EQ(reader.attribute("/config", "seed"), Value(std::numeric_limits<std::uint64_t>::max()));
  EXPECT_EQ(reader.attribute("/x", "unit"), Value("\xce\xb1 per row"));
  EXPECT_EQ(reader.attribute("/", "producer"), Value("test"));
}

TEST_F(WriterTest, CopiesAttributesOfAnyType) {
  const auto source = folder / "source.h5";
  const double vector[] = {1, 2, 3};
  {
    RawFile raw(source);
    raw.text("/", "note", "fixed");
    raw.attribute("/", "vector", H5T_IEEE_F64BE, vector, {3}, H5T_NATIVE_DOUBLE);
    raw.attribute("/", "null", H5T_NATIVE_DOUBLE, nullptr);
    const hid_t text = H5Tcopy(H5T_C_S1);
    H5Tset_size(text, H5T_VARIABLE);
    const char* words[] = {"one", "", "three"};
    raw.attribute("/", "words", text, words, {3});
    H5Tclose(text);
    hobj_ref_t reference{};
    raw.group("/config");
    H5Rcreate(&reference, raw.id(), "/config", H5R_OBJECT, -1);
    raw.attribute("/", "reference", H5T_STD_REF_OBJ, &reference);
    raw.integer("/config", "causal", 1);
  }
  {
    Writer writer(file);
    writer.attribute("/config", "causal", 0);
    writer.copy_attributes(source, "/");
    writer.copy_attributes(source, "/config");
    writer.commit();
  }
  const Reader reader(file);
  EXPECT_EQ(reader.attribute_names("/"),
            (std::vector<std::string>{"note", "null", "schema", "vector", "words"}));
  EXPECT_EQ(reader.attribute("/", "note"), Value("fixed"));
  EXPECT_EQ(reader.attribute("/config", "causal"), Value(1));
  const hid_t id = checked(H5Fopen(file.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT));
  double numbers[3] = {};
  hid_t attribute = checked(H5Aopen(id, "vector", H5P_DEFAULT));
  H5Aread(attribute, H5T_NATIVE_DOUBLE, numbers);
  H5Aclose(attribute);
  EXPECT_TRUE(std::equal(numbers, numbers + 3, vector));
  attribute = checked(H5Aopen(id, "words", H5P_DEFAULT));
  const hid_t type = H5Aget_type(attribute), space = H5Aget_space(attribute);
  char* words[3] = {};
  H5Aread(attribute, type, words);
  EXPECT_STREQ(words[0], "one");
  EXPECT_STREQ(words[2], "three");
  H5Dvlen_reclaim(type, space, H5P_DEFAULT, words);
  H5Sclose(space);
  H5Tclose(type);
  H5Aclose(attribute);
  H5Fclose(id);
}

TEST_F(WriterTest, NothingAppearsBeforeCommit) {
  {
    Writer writer(file);
    writer.write("/x", std::vector<double>{1}, {1});
    EXPECT_FALSE(std::filesystem::exists(file));
    const auto names = folder.names();
    ASSERT_EQ(names.size(), 1u);
    EXPECT_EQ(names[0].find("out.h5.tmp-" + std::to_string(getpid()) + "-"), 0u) << names[0];
    writer.commit();
    EXPECT_EQ(folder.names(), std::vector<std::string>{"out.h5"});
    EXPECT_EQ(message_of<InvalidArgument>([&] { writer.write("/y", std::vector<double>{1}, {1}); }),
              in_file("/y: the file is complete, nothing can be added"));
    EXPECT_EQ(message_of<InvalidArgument>([&] { writer.commit(); }),
              in_file("/: the file is complete, nothing can be added"));
  }
  EXPECT_EQ(folder.names(), std::vector<std::string>{"out.h5"});
  EXPECT_EQ(H5Fget_obj_count(H5F_OBJ_ALL, H5F_OBJ_ALL), 0);
}

TEST_F(WriterTest, WithoutCommitTheOldFileStaysAndNothingElse) {
  write_bytes(file, "old");
  {
    Writer writer(file);
    writer.write("/x", std::vector<double>{1}, {1});
    Writer moved(std::move(writer));
    moved.write("/y", std::vector<double>{1}, {1});
    moved = Writer(file);
  }
  EXPECT_EQ(folder.names(), std::vector<std::string>{"out.h5"});
  EXPECT_EQ(bytes_of(file), "old");
  EXPECT_EQ(H5Fget_obj_count(H5F_OBJ_ALL, H5F_OBJ_ALL), 0);
}

TEST_F(WriterTest, ReplacesAFileThatIsBeingReadAndKeepsItsMode) {
  {
    Writer writer(file);
    writer.write("/x", std::vector<double>{1}, {1});
    writer.commit();
  }
  std::filesystem::permissions(file, std::filesystem::perms(0640));
  const Reader old(file);
  {
    Writer writer(file);
    writer.copy_attributes(file, "/");
    writer.write("/x", std::vector<double>{2}, {1});
    writer.commit();
  }
  EXPECT_EQ(old.read("/x").as<double>(), std::vector<double>{1});
  EXPECT_EQ(raw_read<double>("/x", H5T_NATIVE_DOUBLE), std::vector<double>{2});
  EXPECT_EQ(std::filesystem::status(file).permissions(), std::filesystem::perms(0640));
}

TEST_F(WriterTest, AnOutputBehindALinkKeepsTheLink) {
  std::filesystem::create_directory(folder / "elsewhere");
  const auto target = folder / "elsewhere/real.h5";
  for (const bool exists : {false, true}) {
    if (exists) write_bytes(target, "old");
    std::filesystem::remove(file);
    std::filesystem::create_symlink(target, file);
    Writer writer(file);
    writer.commit();
    EXPECT_TRUE(std::filesystem::is_symlink(file));
    EXPECT_EQ(Reader(target).attribute("/", "schema"), Value("linattn-1"));
    std::filesystem::remove(target);
  }
  std::filesystem::remove(file);
  std::filesystem::create_symlink("out.h5", file);
  EXPECT_EQ(message_of<EnvironmentFailure>([&] { Writer writer(file); }),
            in_file("cannot be written: too many symbolic links"));
}

TEST_F(WriterTest, SaysWhyAnOutputCannotBeWritten) {
  const auto refusal = [](const std::filesystem::path& path) {
    return message_of<EnvironmentFailure>([&] { Writer writer(path); });
  };
  EXPECT_EQ(refusal(folder / ""),
            (folder / "").string() + ": cannot be written: it is a directory");
  write_bytes(file, "a regular file");
  EXPECT_EQ(refusal(file / "out.h5"),
            (file / "out.h5").string() + ": cannot be written: Not a directory");
  const auto missing = folder / "missing/out.h5";
  EXPECT_EQ(refusal(missing).find(missing.string() + ": cannot be written: "), 0u);
  EXPECT_NE(refusal(missing).find("No such file or directory"), std::string::npos);
  EXPECT_EQ(refusal("/dev/null"), "/dev/null: cannot be written: it is not a regular file");
  EXPECT_EQ(refusal(folder / "missing/"),
            (folder / "missing/").string() + ": cannot be written: it names a directory");
  EXPECT_NE(message_of<InvalidArgument>([] { Writer writer(""); }).find("empty name"),
            std::string::npos);
  if (geteuid() != 0) {  // root writes everywhere
    std::filesystem::permissions(file, std::filesystem::perms::owner_read);
    EXPECT_EQ(refusal(file), in_file("cannot be replaced: Permission denied"));
  }
  EXPECT_EQ(folder.names(), std::vector<std::string>{"out.h5"});
}

TEST_F(WriterTest, ATargetThatBecomesAFolderIsReportedAndLeavesNothing) {
  Writer writer(file);
  std::filesystem::create_directory(file);
  EXPECT_EQ(message_of<EnvironmentFailure>([&] {
              writer.commit();
            }).find(in_file("cannot be given its name: ")),
            0u);
  EXPECT_EQ(folder.names(), std::vector<std::string>{"out.h5"});
}

TEST_F(WriterTest, RefusesNamesThatAreTakenOrMalformed) {
  Writer writer(file);
  const std::vector<double> one = {1};
  writer.write("/a/x", one, {1});
  const auto refusal = [&](const std::string& path) {
    return message_of<InvalidArgument>([&] { writer.write(path, one, {1}); });
  };
  EXPECT_EQ(refusal("/a/x"), in_file("/a/x: expected a new name, found an object of that name"));
  EXPECT_EQ(refusal("/a"), in_file("/a: expected a new name, found an object of that name"));
  EXPECT_EQ(refusal("/a/x/y"), in_file("/a/x: expected a group at 'x', found a dataset"));
  for (const char* path : {"", "/", "x", "/a/", "/a//b"})
    EXPECT_EQ(refusal(path), in_file(std::string(path) + ": expected a path such as /output/o"));
  EXPECT_EQ(message_of<InvalidArgument>([&] { writer.attribute("/a", "", 1); }),
            in_file("/a: expected the name of an attribute, found an empty or malformed one"));
  writer.write("/b", one, {1});  // a refusal does not spoil the rest
  writer.commit();
  EXPECT_EQ(Reader(file).children("/"), (std::vector<std::string>{"a", "b"}));
}

TEST_F(WriterTest, EqualContentGivesEqualBytes) {
  std::string bytes[2];
  for (std::string& text : bytes) {
    Writer writer(file);
    writer.attribute("/config", "causal", 1);
    writer.write("/x", std::vector<double>(100, 0.25), {4, 25});
    writer.commit();
    text = bytes_of(file);
    sleep(1);
  }
  EXPECT_EQ(bytes[0], bytes[1]);
}

TEST_F(WriterTest, CompressesInChunks) {
  std::vector<double> values(1 << 16);
  std::iota(values.begin(), values.end(), 0.0);
  {
    Writer writer(file, {.deflate = 6});
    writer.write("/x", values, {256, 256});
    writer.write("/empty", std::vector<double>{}, {0, 3});
    writer.write("/scalar", std::vector<double>{3}, {});
    writer.commit();
  }
  EXPECT_LT(std::filesystem::file_size(file), values.size() * 2);
  EXPECT_EQ(raw_read<double>("/x", H5T_NATIVE_DOUBLE), values);
  EXPECT_EQ(Reader(file).read("/empty").extents(), (std::vector<std::int64_t>{0, 3}));
  EXPECT_NE(message_of<InvalidArgument>([&] { Writer(file, {.deflate = 10}); }).find("found 10"),
            std::string::npos);
}

/// What a writer does in a process that may write files of at most `limit` bytes, 0 if it reports
/// EnvironmentFailure, leaves the old file and no other, and the process can end in peace.
int write_with_limit(const TemporaryFolder& folder, const std::filesystem::path& file, rlim_t limit,
                     std::int64_t elements, int deflate) {
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit file_size{limit, limit};
    setrlimit(RLIMIT_FSIZE, &file_size);
    int status = 1;
    try {
      Writer writer(file, {.deflate = deflate});
      for (int i = 0; i < 3; ++i)
        writer.write("/x" + std::to_string(i),
                     std::vector<double>(static_cast<std::size_t>(elements), 0.1 * i), {elements});
      writer.commit();
      status = 2;
    } catch (const EnvironmentFailure& error) {
      const bool worded = std::string(error.what()).find("File too large") != std::string::npos;
      status = worded ? 0 : 3;
    } catch (...) {
      status = 4;
    }
    if (status == 0 &&
        (folder.names() != std::vector<std::string>{"out.h5"} || bytes_of(file) != "old"))
      status = 5;
    // What HDF5 does when a process ends; it crashes there if a file could not be closed.
    H5close();
    _exit(status);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST_F(WriterTest, AFullDiskIsReportedAndLeavesNothing) {
  write_bytes(file, "old");
  for (const rlim_t limit : {0, 1, 100, 1000, 2000, 2300, 5000, 100000})
    EXPECT_EQ(write_with_limit(folder, file, limit, 100000, 0), 0) << limit;
  for (const rlim_t limit : {0, 100, 1000, 2000, 3000})
    EXPECT_EQ(write_with_limit(folder, file, limit, 100, 0), 0) << limit;
  for (const rlim_t limit : {0, 1000, 2500})
    EXPECT_EQ(write_with_limit(folder, file, limit, 100000, 1), 0) << limit;
  // With room for everything the same child succeeds, so the limit is what the others met.
  EXPECT_EQ(write_with_limit(folder, file, 10000000, 100, 0), 2);
}

// ---- the chunk rule, without the memory it is for ----

std::uint64_t chunk_bytes(const std::vector<std::int64_t>& chunk, std::size_t element) {
  std::uint64_t bytes = element;
  for (const std::int64_t extent : chunk) bytes *= static_cast<std::uint64_t>(extent);
  return bytes;
}

TEST(ChunkRule, SmallDatasetsAreOneChunk) {
  EXPECT_EQ(chunk_extents(std::vector<std::int64_t>{2, 3, 5, 7}, 8),
            (std::vector<std::int64_t>{2, 3, 5, 7}));
  EXPECT_EQ(chunk_extents(std::vector<std::int64_t>{2, 0, 5}, 8),
            (std::vector<std::int64_t>{2, 1, 5}));
  EXPECT_EQ(chunk_extents(std::vector<std::int64_t>{}, 8), std::vector<std::int64_t>{});
}

TEST(ChunkRule, LargeDatasetsAreCutIntoChunksOfSixteenMebibytesAtMost) {
  const std::int64_t huge = std::int64_t{1} << 40;
  const std::vector<std::vector<std::int64_t>> cases = {
      {1, 1, 70000000, 64},
      {64, 32, 65536, 128},
      {1, 1, 1, std::int64_t{1} << 31},
      {5, 7, 100003, 11},
      {huge, 1},
      {1, huge},
      {huge, huge, huge},
      {3, 2097153},
  };
  for (const auto& extents : cases)
    for (const std::size_t element : {1, 2, 4, 8}) {
      const auto chunk = chunk_extents(extents, element);
      ASSERT_EQ(chunk.size(), extents.size());
      for (std::size_t r = 0; r < chunk.size(); ++r) {
        EXPECT_GE(chunk[r], 1);
        EXPECT_LE(chunk[r], extents[r]);
      }
      const std::uint64_t bytes = chunk_bytes(chunk, element);
      EXPECT_LE(bytes, std::uint64_t{16} << 20) << to_string(extents) << " " << element;
      if (chunk != extents) {
        EXPECT_GT(bytes, std::uint64_t{1} << 20) << to_string(extents);
      }
    }
}

TEST(ChunkRule, LeadingExtentsAreCutFirst) {
  EXPECT_EQ(chunk_extents(std::vector<std::int64_t>{64, 32, 65536, 128}, 4),
            (std::vector<std::int64_t>{1, 1, 32768, 128}));
}

}  // namespace
