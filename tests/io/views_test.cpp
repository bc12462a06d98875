// SPDX-License-Identifier: BSD-3-Clause
#include <gtest/gtest.h>

#include <Kokkos_Core.hpp>
#include <algorithm>
#include <cstring>
#include <limits>
#include <linattn/io/reader.hpp>
#include <linattn/io/views.hpp>
#include <linattn/io/writer.hpp>

#include "io_support.hpp"

namespace {

using namespace LinAttn::io;
using namespace LinAttn::test_support;
using LinAttn::InvalidArgument;

constexpr std::int64_t extents[] = {2, 3, 5, 7};

/// A value that tells where it belongs.
template <class T>
T value_at(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) {
  const std::int64_t place = ((a * 3 + b) * 5 + c) * 7 + d + 1;
  if constexpr (std::is_constructible_v<T, std::int64_t>)
    return static_cast<T>(place);
  else
    return T(static_cast<float>(place));
}

/// What EXPECT_EQ can compare.
template <class T>
T plain(T x) {
  return x;
}
std::uint16_t plain(LinAttn::float16 x) { return x.bits; }
std::uint16_t plain(LinAttn::bfloat16 x) { return x.bits; }

template <class T>
std::vector<T> row_major_values() {
  std::vector<T> values;
  for (std::int64_t a = 0; a < 2; ++a)
    for (std::int64_t b = 0; b < 3; ++b)
      for (std::int64_t c = 0; c < 5; ++c)
        for (std::int64_t d = 0; d < 7; ++d) values.push_back(value_at<T>(a, b, c, d));
  return values;
}

template <class Scalar, class Layout, class Space>
struct Case {
  using scalar = Scalar;
  using layout = Layout;
  using space = Space;
};

/// Every element through a host mirror; Kokkos copies between equal layouts itself.
template <class View>
void fill(const View& view) {
  const auto host = Kokkos::create_mirror_view(view);
  for (std::int64_t a = 0; a < 2; ++a)
    for (std::int64_t b = 0; b < 3; ++b)
      for (std::int64_t c = 0; c < 5; ++c)
        for (std::int64_t d = 0; d < 7; ++d)
          host(a, b, c, d) = value_at<typename View::non_const_value_type>(a, b, c, d);
  Kokkos::deep_copy(view, host);
}

template <class View>
void expect_filled(const View& view) {
  const auto host = Kokkos::create_mirror_view(view);
  Kokkos::deep_copy(host, view);
  for (std::int64_t a = 0; a < 2; ++a)
    for (std::int64_t b = 0; b < 3; ++b)
      for (std::int64_t c = 0; c < 5; ++c)
        for (std::int64_t d = 0; d < 7; ++d)
          ASSERT_EQ(plain(host(a, b, c, d)),
                    plain(value_at<typename View::non_const_value_type>(a, b, c, d)));
}

template <class T>
class ViewsTest : public ::testing::Test {};

template <class Space>
using SpaceCases = ::testing::Types<
    Case<double, Kokkos::LayoutLeft, Space>, Case<double, Kokkos::LayoutRight, Space>,
    Case<float, Kokkos::LayoutLeft, Space>, Case<float, Kokkos::LayoutRight, Space>,
    Case<LinAttn::float16, Kokkos::LayoutLeft, Space>,
    Case<LinAttn::float16, Kokkos::LayoutRight, Space>,
    Case<std::int64_t, Kokkos::LayoutLeft, Space>, Case<std::uint8_t, Kokkos::LayoutRight, Space>,
    Case<double, Kokkos::LayoutLeft, Kokkos::DefaultHostExecutionSpace>>;

TYPED_TEST_SUITE(ViewsTest, SpaceCases<Kokkos::DefaultExecutionSpace>);

TYPED_TEST(ViewsTest, ArraysAreRowMajorWhateverTheLayout) {
  using T = typename TypeParam::scalar;
  using View = Kokkos::View<T****, typename TypeParam::layout, typename TypeParam::space>;
  const View view("view", 2, 3, 5, 7);
  fill(view);
  const Array array = to_array(view);
  EXPECT_EQ(array.extents(), std::vector<std::int64_t>(extents, extents + 4));
  const std::vector<T> expected = row_major_values<T>();
  ASSERT_EQ(array.size_bytes(), expected.size() * sizeof(T));
  EXPECT_EQ(std::memcmp(array.data(), expected.data(), array.size_bytes()), 0);

  const typename View::const_type read_only = view;
  const Array again = to_array(typename TypeParam::space(), read_only);
  ASSERT_EQ(again.size_bytes(), array.size_bytes());
  EXPECT_EQ(std::memcmp(again.data(), expected.data(), again.size_bytes()), 0);

  const View other("other", 2, 3, 5, 7);
  copy_into(array, other);
  expect_filled(other);
}

TYPED_TEST(ViewsTest, FilesAreRowMajorWhateverTheLayout) {
  using T = typename TypeParam::scalar;
  const TemporaryFolder folder;
  const Kokkos::View<T****, typename TypeParam::layout, typename TypeParam::space> view("view", 2,
                                                                                        3, 5, 7);
  fill(view);
  {
    Writer writer(folder / "file.h5");
    writer.write("/q", to_array(view));
    writer.commit();
  }
  const hid_t id = checked(H5Fopen((folder / "file.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT));
  const hid_t set = checked(H5Dopen2(id, "/q", H5P_DEFAULT));
  const haddr_t at = H5Dget_offset(set);
  H5Dclose(set);
  H5Fclose(id);
  const std::vector<T> expected = row_major_values<T>();
  const std::string bytes = bytes_of(folder / "file.h5");
  ASSERT_LE(at + expected.size() * sizeof(T), bytes.size());
  EXPECT_EQ(std::memcmp(bytes.data() + at, expected.data(), expected.size() * sizeof(T)), 0);
}

template <class T>
class SlicesTest : public ::testing::Test {};
using Spaces = ::testing::Types<Kokkos::DefaultExecutionSpace, Kokkos::DefaultHostExecutionSpace>;
TYPED_TEST_SUITE(SlicesTest, Spaces);

TYPED_TEST(SlicesTest, SlicedTransposedAndUnmanagedViews) {
  using Left = Kokkos::View<double****, Kokkos::LayoutLeft, TypeParam>;
  const Left whole("whole", 4, 3, 10, 9);
  Kokkos::deep_copy(whole, -1.0);
  using Range = std::pair<int, int>;
  const auto slice = Kokkos::subview(whole, Range(1, 3), Kokkos::ALL, Range(5, 10), Range(2, 9));
  const Array source(row_major_values<double>(), {2, 3, 5, 7});
  copy_into(source, slice);
  EXPECT_EQ(to_array(slice).template as<double>(), source.as<double>());
  // The rest of the buffer is untouched.
  const std::vector<double> all = to_array(whole).template as<double>();
  EXPECT_EQ(std::count(all.begin(), all.end(), -1.0), std::int64_t(all.size()) - source.size());

  // (B, N, H, D) memory seen as (B, H, N, D).
  const Kokkos::View<double****, Kokkos::LayoutRight, TypeParam> tokens("tokens", 2, 5, 3, 7);
  using Strided = Kokkos::View<double****, Kokkos::LayoutStride, TypeParam,
                               Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  const Strided heads(tokens.data(), Kokkos::LayoutStride(2, 105, 3, 7, 5, 21, 7, 1));
  copy_into(TypeParam(), source, heads);
  EXPECT_EQ(to_array(heads).template as<double>(), source.as<double>());
  EXPECT_EQ(to_array(tokens).template as<double>()[7], source.as<double>()[5 * 7]);
}

TYPED_TEST(SlicesTest, ABroadcastRowIsWrittenOut) {
  const Kokkos::View<double*, TypeParam> row("row", 3);
  copy_into(Array(std::vector<double>{1, 2, 3}, {3}), row);
  const Kokkos::View<const double**, Kokkos::LayoutStride, TypeParam,
                     Kokkos::MemoryTraits<Kokkos::Unmanaged>>
      rows(row.data(), Kokkos::LayoutStride(2, 0, 3, 1));
  EXPECT_EQ(to_array(rows).template as<double>(), (std::vector<double>{1, 2, 3, 1, 2, 3}));
}

TYPED_TEST(SlicesTest, EmptyExtents) {
  const Kokkos::View<float***, TypeParam> view("view", 2, 0, 3);
  EXPECT_EQ(to_array(view).extents(), (std::vector<std::int64_t>{2, 0, 3}));
  copy_into(Array(ElementType::f32, {2, 0, 3}), view);
  EXPECT_THROW(copy_into(Array(ElementType::f32, {2, 1, 3}), view), InvalidArgument);
}

TYPED_TEST(SlicesTest, ConvertsToTheTypeOfTheView) {
  const Kokkos::View<float*, TypeParam> singles("singles", 2);
  copy_into(Array(std::vector<double>{0.1, -3}, {2}), singles);
  EXPECT_EQ(to_array(singles).template as<float>(), (std::vector<float>{0.1f, -3}));
  const Kokkos::View<double*, TypeParam> doubles("doubles", 2);
  copy_into(Array(std::vector<float>{0.1f, -3}, {2}), doubles);
  EXPECT_EQ(to_array(doubles).template as<double>(), (std::vector<double>{0.1f, -3}));
  Array half(ElementType::f16, {2});
  const std::uint16_t bits[] = {0x3c00, 0xc000};
  std::memcpy(half.data(), bits, sizeof bits);
  copy_into(half, doubles);
  EXPECT_EQ(to_array(doubles).template as<double>(), (std::vector<double>{1, -2}));
  const Kokkos::View<std::int64_t*, TypeParam> integers("integers", 2);
  EXPECT_EQ(message_of<InvalidArgument>([&] { copy_into(half, integers); }),
            "LinAttn::io: no conversion from float16 to int64");
}

/// A type to compute with that files do not have: rounded on the way in, float on the way out.
TYPED_TEST(SlicesTest, BrainFloats) {
  using Left = Kokkos::View<LinAttn::bfloat16****, Kokkos::LayoutLeft, TypeParam>;
  const Left left("left", 2, 3, 5, 7);
  const Kokkos::View<LinAttn::bfloat16****, Kokkos::LayoutRight, TypeParam> right("right", 2, 3, 5,
                                                                                  7);
  const Array source(row_major_values<double>(), {2, 3, 5, 7});  // integers up to 210 < 2^8
  for (const auto type : {ElementType::f64, ElementType::f32, ElementType::f16}) {
    Array stored(type, source.extents());
    if (type == ElementType::f64) stored = source;
    if (type == ElementType::f32) stored = Array(source.as<float>(), source.extents());
    if (type == ElementType::f16) stored = Array(source.as<LinAttn::float16>(), source.extents());
    copy_into(stored, left);
    copy_into(stored, right);
    expect_filled(left);
    expect_filled(right);
  }
  for (const Array& array : {to_array(left), to_array(right)}) {
    EXPECT_EQ(array.type(), ElementType::f32);
    EXPECT_EQ(array.extents(), source.extents());
    EXPECT_EQ(array.template as<double>(), source.as<double>());
  }
}

TYPED_TEST(SlicesTest, RoundsToTheTypeOfTheView) {
  const Array source(std::vector<double>{1 + 0x1p-11 + 0x1p-40, 1 + 0x1p-8 + 0x1p-40, 1e6}, {3});
  const Kokkos::View<LinAttn::float16*, TypeParam> half("half", 3);
  copy_into(source, half);
  EXPECT_EQ(to_array(half).type(), ElementType::f16);
  EXPECT_EQ(
      to_array(half).template as<float>(),
      (std::vector<float>{1 + 0x1p-10f, 1 + 0x1p-8f, std::numeric_limits<float>::infinity()}));
  const Kokkos::View<LinAttn::bfloat16*, TypeParam> brain("brain", 3);
  copy_into(source, brain);
  EXPECT_EQ(to_array(brain).template as<float>(), (std::vector<float>{1, 1 + 0x1p-7f, 999424.0f}));
}

TYPED_TEST(SlicesTest, NamesBothExtentsWhenTheyDiffer) {
  const Kokkos::View<double**, TypeParam> view("view", 2, 3);
  EXPECT_EQ(message_of<InvalidArgument>([&] {
              copy_into(Array(ElementType::f64, {3, 2}), view);
            }),
            "LinAttn::io: expected an array with extents (2, 3), found (3, 2)");
  EXPECT_EQ(message_of<InvalidArgument>([&] { copy_into(Array(ElementType::f64, {6}), view); }),
            "LinAttn::io: expected an array with extents (2, 3), found (6)");
}

}  // namespace
