// SPDX-License-Identifier: BSD-3-Clause

// Linformer attention against dense matrices.

#include <limits>
#include <linattn/baselines/linformer.hpp>

#include "baseline_case.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using baselines::Linformer;

/// The projections of a case; without F it is E.
struct Strips {
  std::int64_t rank;
  std::vector<double> e, f;
};

std::vector<double> dense(const Linformer& linformer, const Numbers& n, const Strips& s) {
  const double scale = linformer.scale != 0 ? linformer.scale : 1 / std::sqrt(static_cast<double>(n.p.d));
  const Matrix e(s.rank, n.p.nk, s.e.data()), f(s.rank, n.p.nk, s.f.empty() ? s.e.data() : s.f.data());
  return n.attend([&](const Matrix& q, const Matrix& k, const Matrix& v) {
    return times(softmax(q, times(e, k), scale), times(f, v));
  });
}

template <class T, class ExecSpace>
struct Call : Placed<T, ExecSpace> {
  Call(const Numbers& n, const Strips& s, Layout layout = Layout::right)
      : Placed<T, ExecSpace>(n, layout),
        rank(s.rank),
        two(!s.f.empty()),
        e{{rank, n.p.nk}, layout == Layout::right ? layout : Layout::left},
        f{e.extents(), Layout::right},
        d_e{e.extents(), layout == Layout::right ? layout : Layout::left},
        d_f{e.extents(), Layout::right} {
    e.set(s.e);
    if (two) f.set(s.f);
  }
  baselines::Projections<ExecSpace, const T> projections() const {
    baselines::Projections<ExecSpace, const T> given{.e = e.input()};
    if (two) given.f = f.input();
    return given;
  }
  baselines::LinformerSaved<ExecSpace, T> saved() const {
    return {.o = this->o.ref(), .denominator = this->denominator.ref()};
  }
  void forward() {
    const auto workspace =
        bytes_of_nan<ExecSpace>(baselines::workspace_size<T>(exec, linformer, this->p, rank, Pass::forward));
    baselines::forward<T>(exec, linformer, this->inputs(), projections(), saved(), workspace);
    exec.fence();
  }
  void backward() {
    const auto workspace =
        bytes_of_nan<ExecSpace>(baselines::workspace_size<T>(exec, linformer, this->p, rank, Pass::backward));
    baselines::Projections<ExecSpace, T> wanted{.e = d_e.ref()};
    if (two) wanted.f = d_f.ref();
    baselines::backward<T>(exec, linformer, this->inputs(), projections(), saved(), this->d_o.input(),
                           this->gradients(), wanted, workspace);
    exec.fence();
  }

  ExecSpace exec{};
  Linformer linformer{};
  std::int64_t rank;
  bool two;
  PlacedTensor<T, 2, ExecSpace> e, f, d_e, d_f;
};

template <class C>
class LinformerAttention : public ::testing::Test {
 public:
  using T = typename C::T;
  using ExecSpace = typename C::ExecSpace;

  static Strips strips(const Problem& p, std::int64_t rank, bool two) {
    Random random(seed() + 5);
    Strips s{rank, random.normals(rank * p.nk, 0, 1 / std::sqrt(static_cast<double>(p.nk))), {}};
    if (two) s.f = random.normals(rank * p.nk, 0, 1 / std::sqrt(static_cast<double>(p.nk)));
    for (auto* x : {&s.e, &s.f})
      for (double& entry : *x) entry = static_cast<double>(static_cast<T>(entry));
    return s;
  }
};
TYPED_TEST_SUITE(LinformerAttention, OverScalars, ConfigName);

const Problem shapes[] = {{2, 2, 2, 37, 37, 8, 5}, {1, 4, 2, 70, 131, 5, 9}, {1, 1, 1, 3, 1, 3, 2}};

TYPED_TEST(LinformerAttention, AgreesWithDenseMatrices) {
  using T = typename TestFixture::T;
  for (const Problem& p : shapes)
    for (const std::int64_t rank : {1, 16, 70})
      for (const bool two : {false, true})
        for (const Layout layout : {Layout::right, Layout::gaps}) {
          const auto n = Numbers::of<T>(p);
          const Strips s = this->strips(p, rank, two);
          Call<T, typename TestFixture::ExecSpace> call(n, s, layout);
          call.forward();
          const auto expected = [&] { return dense(call.linformer, n, s); };
          EXPECT_LE(relative_error(call.o.get(), expected()), rounding_error<T>(expected, longest_sum(p, rank)))
              << p.to_string() << " rank=" << rank;
          EXPECT_TRUE(call.intact());
        }
}

TYPED_TEST(LinformerAttention, GradientsAreThoseOfDenseMatrices) {
  using T = typename TestFixture::T;
  if (!std::is_same_v<T, double>) return;
  for (const Problem& p : shapes)
    for (const bool two : {false, true}) {
      const auto n = Numbers::of<T>(p);
      const Strips s = this->strips(p, 67, two);
      Call<double, typename TestFixture::ExecSpace> call(n, s, two ? Layout::gaps : Layout::right);
      call.forward();
      call.backward();
      SCOPED_TRACE(p.to_string());
      const auto with = [&](std::vector<double> Numbers::*member) {
        return [&, member](const std::vector<double>& x) {
          Numbers moved = n;
          moved.*member = x;
          return n.loss(dense(call.linformer, moved, s));
        };
      };
      const auto with_strip = [&](std::vector<double> Strips::*member) {
        return [&, member](const std::vector<double>& x) {
          Strips moved = s;
          moved.*member = x;
          return n.loss(dense(call.linformer, n, moved));
        };
      };
      expect_gradient("dq", call.d_q.get(), n.q, with(&Numbers::q));
      expect_gradient("dk", call.d_k.get(), n.k, with(&Numbers::k));
      expect_gradient("dv", call.d_v.get(), n.v, with(&Numbers::v));
      expect_gradient("dE", call.d_e.get(), s.e, with_strip(&Strips::e));
      if (two) expect_gradient("dF", call.d_f.get(), s.f, with_strip(&Strips::f));
      EXPECT_TRUE(call.intact() && call.d_e.guards_intact() && call.d_f.guards_intact());
    }
}

TYPED_TEST(LinformerAttention, GradientsInFloatAreThoseInDouble) {
  if (!std::is_same_v<typename TestFixture::T, float>) return;
  using ExecSpace = typename TestFixture::ExecSpace;
  for (const Problem& p : shapes) {
    SCOPED_TRACE(p.to_string());
    const auto n = Numbers::of<float>(p);
    const Strips s = this->strips(p, 20, true);
    expect_gradients_of_double<float>(n, longest_sum(p, 20), [&]<class T>(const Numbers& numbers, T) {
      Call<T, ExecSpace> call(numbers, s);
      call.forward();
      call.backward();
      return std::vector<std::vector<double>>{doubles(call.d_q.get()), doubles(call.d_k.get()), doubles(call.d_v.get()),
                                              doubles(call.d_e.get()), doubles(call.d_f.get())};
    });
  }
}

TYPED_TEST(LinformerAttention, OneAndSeveralThreadsGiveTheSameBits) {
#if defined(KOKKOS_ENABLE_SERIAL)
  using T = typename TestFixture::T;
  using ExecSpace = typename TestFixture::ExecSpace;
  if (!LinAttn::detail::is_host_space_v<ExecSpace>) return;
  const auto n = Numbers::of<T>({2, 4, 2, 150, 170, 16, 8});
  const Strips s = this->strips(n.p, 70, true);
  Call<T, ExecSpace> several(n, s);
  Call<T, Kokkos::Serial> one(n, s);
  several.forward();
  several.backward();
  one.forward();
  one.backward();
  EXPECT_TRUE(same_bits(several.o.get(), one.o.get()));
  EXPECT_TRUE(same_bits(several.d_q.get(), one.d_q.get()));
  EXPECT_TRUE(same_bits(several.d_k.get(), one.d_k.get()));
  EXPECT_TRUE(same_bits(several.d_v.get(), one.d_v.get()));
  EXPECT_TRUE(same_bits(several.d_e.get(), one.d_e.get()));
  EXPECT_TRUE(same_bits(several.d_f.get(), one.d_f.get()));
#endif
}

TYPED_TEST(LinformerAttention, EmptyExtents) {
  using T = typename TestFixture::T;
  for (const Problem& p : {Problem{0, 2, 2, 5, 6, 3, 2}, Problem{1, 0, 0, 5, 6, 3, 2}, Problem{1, 2, 2, 0, 6, 3, 2},
                           Problem{1, 2, 2, 5, 6, 3, 0}}) {
    SCOPED_TRACE(p.to_string());
    Call<T, typename TestFixture::ExecSpace> call(Numbers::of<T>(p), this->strips(p, 4, true));
    call.forward();
    call.backward();
    EXPECT_EQ(relative_error(call.d_k.get(), std::vector<double>(call.d_k.get().size())), 0);
    EXPECT_EQ(relative_error(call.d_e.get(), std::vector<double>(24)), 0);
    EXPECT_EQ(relative_error(call.d_f.get(), std::vector<double>(24)), 0);
  }
}

// A matrix (Nq, rank) would add `rank` numbers for a row.
TYPED_TEST(LinformerAttention, NoMatrixOfQueriesIsFormed) {
  using T = typename TestFixture::T;
  const typename TestFixture::ExecSpace exec;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const auto bytes = [&](std::int64_t n) {
      return baselines::workspace_size<T>(exec, Linformer{}, {1, 1, 1, n, n, 8, 8}, 256, pass);
    };
    EXPECT_LE(bytes(1 << 16) - bytes(1 << 15), (std::size_t(1) << 15) * 16 * sizeof(T));
  }
}

TYPED_TEST(LinformerAttention, IsExactWithTheIdentity) {
  using T = typename TestFixture::T;
  const auto n = Numbers::of<T>({1, 2, 1, 40, 40, 6, 6});
  Strips s{40, std::vector<double>(1600), {}};
  for (std::size_t i = 0; i < 40; ++i) s.e[41 * i] = 1;
  Call<T, typename TestFixture::ExecSpace> call(n, s);
  call.forward();
  Placed<T, typename TestFixture::ExecSpace> exact(n);
  forward<T>(call.exec, Softmax{}, exact.inputs(), {.o = exact.o.ref()});
  EXPECT_TRUE(same_bits(call.o.get(), exact.o.get()));
}

TYPED_TEST(LinformerAttention, RefusesWhatItHasNot) {
  using T = typename TestFixture::T;
  using ExecSpace = typename TestFixture::ExecSpace;
  const auto n = Numbers::of<T>({1, 1, 1, 8, 9, 3, 3});
  Call<T, ExecSpace> call(n, this->strips(n.p, 4, false));
  const auto workspace = bytes_of_nan<ExecSpace>(64);
  auto projections = call.projections();
  projections.f =
      call.q.input().present() ? TensorRef<const T, 2, ExecSpace>(call.q.ref().data(), {4, 8}, {8, 1}) : projections.f;
  expect_refusal([&] { baselines::forward<T>(call.exec, {}, call.inputs(), projections, call.saved(), workspace); },
                 {"projection F", "(4, 9)", "(4, 8)"});
  expect_refusal([&] { baselines::forward<T>(call.exec, {}, call.inputs(), {}, call.saved(), workspace); },
                 {"projection E"});
  expect_refusal([&] { baselines::workspace_size<T>(call.exec, Linformer{}, n.p, 0, Pass::forward); }, {"1 to", "0"});
  auto inputs = call.inputs();
  PlacedTensor<std::uint8_t, 2, ExecSpace> mask{{1, 9}, Layout::right};
  inputs.key_mask = mask.input();
  expect_refusal([&] { baselines::forward<T>(call.exec, {}, inputs, call.projections(), call.saved(), workspace); },
                 {"linformer", "key mask"});
  baselines::Projections<ExecSpace, T> wanted{.e = call.d_e.ref(), .f = call.d_f.ref()};
  expect_refusal(
      [&] {
        baselines::backward<T>(call.exec, {}, call.inputs(), call.projections(), call.saved(), call.d_o.input(),
                               call.gradients(), wanted, workspace);
      },
      {"gradient of F"});
}

}  // namespace
