// SPDX-License-Identifier: BSD-3-Clause

// Nystromformer attention against dense matrices.

#include <limits>
#include <linattn/baselines/nystrom.hpp>

#include "baseline_case.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using baselines::Nystrom;

Matrix means(const Matrix& x, std::int64_t m) {
  Matrix c(m, x.columns);
  for (std::int64_t s = 0; s < m; ++s) {
    const std::int64_t begin = s * x.rows / m, end = (s + 1) * x.rows / m;
    for (std::int64_t j = 0; j < x.columns; ++j) {
      for (std::int64_t i = begin; i < end; ++i) c(s, j) += x(i, j);
      c(s, j) /= static_cast<double>(end - begin);
    }
  }
  return c;
}

/// c I - x
Matrix from_identity(double c, const Matrix& x) {
  Matrix result(x.rows, x.columns);
  for (std::int64_t i = 0; i < x.rows; ++i)
    for (std::int64_t j = 0; j < x.columns; ++j) result(i, j) = (i == j ? c : 0) - x(i, j);
  return result;
}

Matrix pseudo_inverse(const Matrix& a, int iterations) {
  double row = 0, column = 0;
  for (std::int64_t i = 0; i < a.rows; ++i) {
    double r = 0, c = 0;
    for (std::int64_t j = 0; j < a.rows; ++j) {
      r += a(i, j);
      c += a(j, i);
    }
    row = std::max(row, r);
    column = std::max(column, c);
  }
  Matrix z = transposed(a);
  for (double& entry : z.x) entry /= row * column;
  for (int i = 0; i < iterations; ++i) {
    const Matrix y = times(a, z);
    z = times(z, from_identity(13, times(y, from_identity(15, times(y, from_identity(7, y))))));
    for (double& entry : z.x) entry /= 4;
  }
  return z;
}

Matrix dense(const Nystrom& nystrom, const Matrix& q, const Matrix& k, const Matrix& v) {
  const double scale = nystrom.scale != 0 ? nystrom.scale : 1 / std::sqrt(static_cast<double>(q.columns));
  const Matrix qt = means(q, nystrom.landmarks), kt = means(k, nystrom.landmarks);
  const Matrix z = pseudo_inverse(softmax(qt, kt, scale), nystrom.iterations);
  return times(softmax(q, kt, scale), times(z, times(softmax(qt, k, scale), v)));
}

std::vector<double> dense(const Nystrom& nystrom, const Numbers& n) {
  return n.attend([&](const Matrix& q, const Matrix& k, const Matrix& v) { return dense(nystrom, q, k, v); });
}

template <class T, class ExecSpace>
struct Call : Placed<T, ExecSpace> {
  Call(const Nystrom& nystrom_, const Numbers& n, Layout layout = Layout::right)
      : Placed<T, ExecSpace>(n, layout), nystrom(nystrom_), kept{{nystrom.kept<T>(n.p)}, Layout::right} {}

  baselines::NystromSaved<ExecSpace, T> saved() const {
    return {.o = this->o.ref(), .denominator = this->denominator.ref(), .kept = kept.ref()};
  }
  void forward() {
    const auto workspace = bytes_of_nan<ExecSpace>(baselines::workspace_size<T>(exec, nystrom, this->p, Pass::forward));
    baselines::forward<T>(exec, nystrom, this->inputs(), saved(), workspace);
    exec.fence();
  }
  void backward() {
    const auto workspace =
        bytes_of_nan<ExecSpace>(baselines::workspace_size<T>(exec, nystrom, this->p, Pass::backward));
    baselines::backward<T>(exec, nystrom, this->inputs(), saved(), this->d_o.input(), this->gradients(), workspace);
    exec.fence();
  }

  ExecSpace exec{};
  Nystrom nystrom;
  PlacedTensor<T, 1, ExecSpace> kept;
};

template <class C>
class NystromAttention : public ::testing::Test {
 public:
  using T = typename C::T;
  using ExecSpace = typename C::ExecSpace;
};
TYPED_TEST_SUITE(NystromAttention, OverScalars, ConfigName);

struct Shape {
  Problem p;
  std::int64_t landmarks;
};
const std::vector<Shape>& shapes() {
  //                             B  H Hkv  Nq  Nk  D  Dv   m
  static const std::vector<Shape> list{{{2, 2, 2, 37, 37, 8, 5}, 6},
                                       {{1, 4, 2, 50, 31, 5, 9}, 16},
                                       {{1, 1, 1, 17, 40, 3, 2}, 17},
                                       {{1, 2, 1, 9, 9, 4, 4}, 1},
                                       {{1, 1, 1, 200, 200, 16, 16}, 33}};
  return list;
}

TYPED_TEST(NystromAttention, AgreesWithDenseMatrices) {
  using T = typename TestFixture::T;
  for (const Shape& shape : shapes())
    for (const Layout layout : {Layout::right, Layout::gaps}) {
      const Nystrom nystrom{.landmarks = shape.landmarks};
      const auto n = Numbers::of<T>(shape.p);
      Call<T, typename TestFixture::ExecSpace> call(nystrom, n, layout);
      call.forward();
      const auto expected = [&] { return dense(nystrom, n); };
      EXPECT_LE(relative_error(call.o.get(), expected()),
                rounding_error<T>(expected, longest_sum(shape.p, shape.landmarks)))
          << shape.p.to_string() << " m=" << shape.landmarks;
      EXPECT_TRUE(call.intact());
    }
}

TYPED_TEST(NystromAttention, GradientsAreThoseOfDenseMatrices) {
  using T = typename TestFixture::T;
  if (!std::is_same_v<T, double>) return;
  for (const Shape& shape : shapes()) {
    if (shape.p.nq > 100) continue;
    const Nystrom nystrom{.landmarks = shape.landmarks, .iterations = 4, .scale = 0.7};
    const auto n = Numbers::of<T>(shape.p);
    Call<double, typename TestFixture::ExecSpace> call(nystrom, n);
    call.forward();
    call.backward();
    SCOPED_TRACE(shape.p.to_string() + " m=" + std::to_string(shape.landmarks));
    const auto with = [&](std::vector<double> Numbers::*member) {
      return [&, member](const std::vector<double>& x) {
        Numbers moved = n;
        moved.*member = x;
        return n.loss(dense(nystrom, moved));
      };
    };
    expect_gradient("dq", call.d_q.get(), n.q, with(&Numbers::q));
    expect_gradient("dk", call.d_k.get(), n.k, with(&Numbers::k));
    expect_gradient("dv", call.d_v.get(), n.v, with(&Numbers::v));
    EXPECT_TRUE(call.intact());
  }
}

TYPED_TEST(NystromAttention, GradientsInFloatAreThoseInDouble) {
  if (!std::is_same_v<typename TestFixture::T, float>) return;
  using ExecSpace = typename TestFixture::ExecSpace;
  for (const Shape& shape : shapes()) {
    SCOPED_TRACE(shape.p.to_string() + " m=" + std::to_string(shape.landmarks));
    const Nystrom nystrom{.landmarks = shape.landmarks};
    const auto n = Numbers::of<float>(shape.p);
    expect_gradients_of_double<float>(n, longest_sum(shape.p, shape.landmarks),
                                      [&]<class T>(const Numbers& numbers, T) {
                                        Call<T, ExecSpace> call(nystrom, numbers);
                                        call.forward();
                                        call.backward();
                                        return std::vector<std::vector<double>>{
                                            doubles(call.d_q.get()), doubles(call.d_k.get()), doubles(call.d_v.get())};
                                      });
  }
}

TYPED_TEST(NystromAttention, EmptyExtents) {
  using T = typename TestFixture::T;
  for (const Problem& p : {Problem{0, 2, 2, 5, 6, 3, 2}, Problem{1, 0, 0, 5, 6, 3, 2}, Problem{1, 2, 2, 5, 6, 3, 0}}) {
    SCOPED_TRACE(p.to_string());
    Call<T, typename TestFixture::ExecSpace> call({.landmarks = 4}, Numbers::of<T>(p));
    if (call.kept.count() == 0) continue;  // nothing to keep, and nothing to compute
    call.forward();
    call.backward();
    EXPECT_EQ(relative_error(call.d_q.get(), std::vector<double>(call.d_q.get().size())), 0);
    EXPECT_EQ(relative_error(call.d_k.get(), std::vector<double>(call.d_k.get().size())), 0);
  }
}

// A matrix (N, m) would add m numbers for a row.
TYPED_TEST(NystromAttention, NoMatrixOfRowsAndLandmarksIsFormed) {
  using T = typename TestFixture::T;
  const typename TestFixture::ExecSpace exec;
  const Nystrom nystrom{};
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const auto bytes = [&](std::int64_t n) {
      return baselines::workspace_size<T>(exec, nystrom, {1, 1, 1, n, n, 8, 8}, pass);
    };
    EXPECT_LE(bytes(1 << 16) - bytes(1 << 15), (std::size_t(1) << 15) * 16 * sizeof(T));
  }
}

// With a landmark for each row F1 = A = F2, and A A^+ A = A.
TYPED_TEST(NystromAttention, IsExactWithALandmarkForEachRow) {
  using T = typename TestFixture::T;
  const Nystrom nystrom{.landmarks = 24, .iterations = 40, .scale = 2};
  const auto n = Numbers::of<T>({1, 1, 1, 24, 24, 24, 6});
  Call<T, typename TestFixture::ExecSpace> call(nystrom, n);
  call.forward();
  const auto exact =
      n.attend([&](const Matrix& q, const Matrix& k, const Matrix& v) { return times(softmax(q, k, 2), v); });
  const auto expected = [&] { return dense(nystrom, n); };
  const double remainder = relative_error(expected(), exact);  // of the iteration, in double
  EXPECT_LT(remainder, rounding_error<double>(expected, 24));
  EXPECT_LE(relative_error(call.o.get(), exact), remainder + rounding_error<T>(expected, 24));
}

TYPED_TEST(NystromAttention, OneAndSeveralThreadsGiveTheSameBits) {
#if defined(KOKKOS_ENABLE_SERIAL)
  using T = typename TestFixture::T;
  using ExecSpace = typename TestFixture::ExecSpace;
  if (!LinAttn::detail::is_host_space_v<ExecSpace>) return;
  const Nystrom nystrom{.landmarks = 20};
  const auto n = Numbers::of<T>({1, 3, 3, 150, 150, 16, 8});
  Call<T, ExecSpace> several(nystrom, n);
  Call<T, Kokkos::Serial> one(nystrom, n);
  several.forward();
  several.backward();
  one.forward();
  one.backward();
  EXPECT_TRUE(same_bits(several.o.get(), one.o.get()));
  EXPECT_TRUE(same_bits(several.d_q.get(), one.d_q.get()));
  EXPECT_TRUE(same_bits(several.d_k.get(), one.d_k.get()));
  EXPECT_TRUE(same_bits(several.d_v.get(), one.d_v.get()));
#endif
}

TYPED_TEST(NystromAttention, NothingNeedBeKeptWithoutABackwardPass) {
  using T = typename TestFixture::T;
  const Nystrom nystrom{.landmarks = 7};
  const auto n = Numbers::of<T>({1, 2, 2, 30, 30, 6, 6});
  Call<T, typename TestFixture::ExecSpace> call(nystrom, n);
  call.forward();
  const auto expected = call.o.get();
  const auto workspace = bytes_of_nan<typename TestFixture::ExecSpace>(
      baselines::workspace_size<T>(call.exec, nystrom, n.p, Pass::forward, false));
  baselines::forward<T>(call.exec, nystrom, call.inputs(), {.o = call.o.ref()}, workspace);
  call.exec.fence();
  EXPECT_TRUE(same_bits(call.o.get(), expected));
}

TYPED_TEST(NystromAttention, RefusesWhatItHasNot) {
  using T = typename TestFixture::T;
  using ExecSpace = typename TestFixture::ExecSpace;
  const auto n = Numbers::of<T>({1, 1, 1, 8, 9, 3, 3});
  Call<T, ExecSpace> call({.landmarks = 4}, n);
  const auto refuse = [&](const Nystrom& nystrom, const std::vector<std::string>& pieces) {
    expect_refusal([&] { baselines::workspace_size<T>(call.exec, nystrom, n.p, Pass::forward); }, pieces);
  };
  refuse({.landmarks = 9}, {"landmarks", "9", "Nq = 8"});
  refuse({.landmarks = 0}, {"landmarks", "0"});
  refuse({.landmarks = 4, .iterations = 0}, {"iterations", "0"});
  refuse({.landmarks = 4, .scale = -1}, {"scale", "-1"});
  auto inputs = call.inputs();
  PlacedTensor<std::uint8_t, 2, ExecSpace> mask{{1, 9}, Layout::right};
  inputs.key_mask = mask.input();
  const auto workspace = bytes_of_nan<ExecSpace>(64);
  expect_refusal([&] { baselines::forward<T>(call.exec, call.nystrom, inputs, call.saved(), workspace); },
                 {"nystrom", "key mask", "landmarks average"});
  expect_refusal([&] { baselines::forward<T>(call.exec, call.nystrom, call.inputs(), call.saved(), workspace); },
                 {"workspace", "nystrom", "64"});
  auto saved = call.saved();
  const std::int64_t kept = saved.kept.extent(0);
  saved.kept = TensorRef<T, 1, ExecSpace>(saved.kept.data(), {kept}, {2});
  expect_refusal([&] { baselines::forward<T>(call.exec, call.nystrom, call.inputs(), saved, workspace); },
                 {"kept", "contiguous", "stride 2"});
  saved.kept = {};
  expect_refusal(
      [&] {
        baselines::backward<T>(call.exec, call.nystrom, call.inputs(), saved, call.d_o.input(), call.gradients(),
                               workspace);
      },
      {"kept"});
}

}  // namespace
