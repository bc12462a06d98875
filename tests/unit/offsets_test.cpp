// SPDX-License-Identifier: BSD-3-Clause

// Offsets beyond 2^31 elements: tensors of few elements spread over an address range far larger
// than the memory of the machine.

#include <sys/mman.h>

#include "attention_case.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

/// Address space without memory behind it until it is touched.
class AddressRange {
 public:
  explicit AddressRange(std::size_t bytes) : m_bytes(bytes) {
    m_begin = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~AddressRange() {
    if (valid()) munmap(m_begin, m_bytes);
  }
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;
  bool valid() const { return m_begin != MAP_FAILED; }
  char* begin() const { return static_cast<char*>(m_begin); }

 private:
  std::size_t m_bytes;
  void* m_begin;
};

template <class C>
class Offsets : public ::testing::Test {};
TYPED_TEST_SUITE(Offsets, OverScalars, ConfigName);

TYPED_TEST(Offsets, EveryDimensionBeyond32Bits) {
  using T = typename TypeParam::T;
  using ExecSpace = typename TypeParam::ExecSpace;
  using A = accumulator_t<T>;
  if (!LinAttn::detail::is_host_space_v<ExecSpace>) GTEST_SKIP() << "needs host memory";
  const Problem p{2, 2, 2, 5, 7, 3, 2};
  const Options options{.causal = true, .chunk = 4, .segments = 2};

  // Strides of 2^32 elements and more for batch, head and row in turn, and of elements so that one
  // row alone passes 2^31. Products of an index and a stride, and their sums, all leave 32 bits.
  struct Strides {
    std::int64_t batch, head, row, element;
  };
  const std::int64_t big = (std::int64_t(1) << 32) + 64;
  const Strides spreads[] = {
      {big, 4096, 64, 1}, {4096, big, 64, 1}, {4096, 2048, big / 4, 1}, {4096, 2048, 64, big / 2}};
  const std::size_t bytes = sizeof(T) * static_cast<std::size_t>(2 * big + (1 << 20));
  const AddressRange range(bytes);
  if (!range.valid())
    GTEST_SKIP() << "this system grants no " << bytes << " bytes of address space";

  const Case c = random_case<T, Lln>(p, options);
  const auto expected = expected_of<T, Lln>(c, options);
  for (const Strides& s : spreads) {
    SCOPED_TRACE(std::to_string(s.batch) + " " + std::to_string(s.head) + " " +
                 std::to_string(s.row) + " " + std::to_string(s.element));
    std::size_t used = 0;
    const auto tensor = [&]<class U>(U, std::int64_t heads, std::int64_t rows, std::int64_t width) {
      U* const data = reinterpret_cast<U*>(range.begin()) + used;
      used += 16384;
      return TensorRef<U, 4, ExecSpace>(data, {p.batch, heads, rows, width},
                                        {s.batch, s.head, s.row, s.element});
    };
    const auto visit = [&](const auto& t, const auto& body) {
      std::size_t n = 0;
      for (std::int64_t b = 0; b < t.extent(0); ++b)
        for (std::int64_t h = 0; h < t.extent(1); ++h)
          for (std::int64_t i = 0; i < t.extent(2); ++i)
            for (std::int64_t e = 0; e < t.extent(3); ++e) body(n++, t(b, h, i, e));
    };
    const auto fill = [&](const auto& t, const std::vector<double>& values) {
      visit(t, [&](std::size_t n, T& x) { x = static_cast<T>(values[n]); });
    };
    const auto get = [&](const auto& t) {
      std::vector<T> values;
      visit(t, [&](std::size_t, T& x) { values.push_back(x); });
      return values;
    };
    const auto q = tensor(T(), p.heads, p.nq, p.d), k = tensor(T(), p.kv_heads, p.nk, p.d),
               v = tensor(T(), p.kv_heads, p.nk, p.dv), o = tensor(T(), p.heads, p.nq, p.dv),
               d_o = tensor(T(), p.heads, p.nq, p.dv), d_q = tensor(T(), p.heads, p.nq, p.d),
               d_k = tensor(T(), p.kv_heads, p.nk, p.d), d_v = tensor(T(), p.kv_heads, p.nk, p.dv);
    fill(q, c.q);
    fill(k, c.k);
    fill(v, c.v);
    fill(d_o, c.d_o);
    const TensorRef<A, 3, ExecSpace> sums(reinterpret_cast<A*>(range.begin()) + used,
                                          {p.batch, p.heads, p.nq}, {s.batch, s.head, s.row});
    const ExecSpace exec;
    const Lln variant{
        Kokkos::View<const double*, Kokkos::HostSpace>(c.alpha.data(), c.alpha.size()),
        Kokkos::View<const double*, Kokkos::HostSpace>(c.beta.data(), c.beta.size())};
    const Inputs<ExecSpace, T> inputs{.q = q, .k = k, .v = v};
    const Saved<ExecSpace, T> saved{.o = o, .denominator = sums};
    forward<T>(exec, variant, inputs, saved, options);
    backward<T>(exec, variant, inputs, saved, d_o, {.q = d_q, .k = d_k, .v = d_v}, options);
    Outcome<T> found;
    found.o = get(o);
    found.q = get(d_q);
    found.k = get(d_k);
    found.v = get(d_v);
    for (const double x : expected.gradient.alpha) found.alpha.push_back(x);
    for (const double x : expected.gradient.beta) found.beta.push_back(x);
    EXPECT_TRUE((agrees<T, Lln>(c, found, expected, options.chunk)));
  }
}

// The element operator of a tensor reference, by address alone.
TEST(TensorReference, IndexesWith64Bits) {
  char base = 0;
  const std::int64_t stride = std::int64_t(1) << 33;
  const TensorRef<char, 2, Kokkos::DefaultHostExecutionSpace> tensor(&base, {3, 1}, {stride, 1});
  EXPECT_EQ(tensor.stride(0), stride);
  EXPECT_EQ(&tensor(0, 0), &base);
}

}  // namespace
