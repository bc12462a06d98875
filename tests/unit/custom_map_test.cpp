// SPDX-License-Identifier: BSD-3-Clause

// Feature maps that the library does not ship: maps of whole rows with another number of features
// than entries, and a parameter on one side only.

#include "attention_case.hpp"
#include "finite_difference.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

/// x -> (y, 1 + y_d y_(d+1)), y = x / sqrt(1 + |x|^2): 2 D features that mix the entries.
struct PairMap {
  KOKKOS_FUNCTION std::int64_t features(std::int64_t d) const { return 2 * d; }
  template <class T>
  KOKKOS_FUNCTION static T inverse_norm(ConstRow<T> x) {
    using std::sqrt;
    T sum = 1;
    for (std::int64_t i = 0; i < x.size; ++i) sum += x[i] * x[i];
    return T(1) / sqrt(sum);
  }
  template <class T>
  KOKKOS_FUNCTION void row_value(ConstRow<T> x, Row<T> f) const {
    const T scale = inverse_norm(x);
    for (std::int64_t i = 0; i < x.size; ++i) {
      f[i] = 2 + scale * x[i];
      f[x.size + i] = 2 + scale * scale * x[i] * x[(i + 1) % x.size];
    }
  }
  template <class T>
  KOKKOS_FUNCTION void row_pullback(ConstRow<T> x, ConstRow<T>, ConstRow<T> df, Row<T> dx) const {
    const T scale = inverse_norm(x);
    const std::int64_t n = x.size;
    T along = 0;  // sum_i dy_i y_i
    const auto dy = [&](std::int64_t i) {
      const std::int64_t before = (i + n - 1) % n, after = (i + 1) % n;
      return df[i] + scale * (df[n + i] * x[after] + df[n + before] * x[before]);
    };
    for (std::int64_t i = 0; i < n; ++i) along += dy(i) * scale * x[i];
    for (std::int64_t i = 0; i < n; ++i) dx[i] = scale * (dy(i) - along * scale * x[i]);
  }
};
static_assert(RowFeatureMap<PairMap> && FeatureMap<PairMap>);
static_assert(!ElementwiseFeatureMap<PairMap> && !ScaledFeatureMap<PairMap>);

struct Pairs : SameMapVariant<PairMap> {
  static constexpr const char* name = "pairs";
};

/// phi(x) = 1 + a x^2 with one a for each head.
struct BoundParabola {
  double a;
  template <class T>
  KOKKOS_FUNCTION T value(T x) const {
    return T(1) + T(a) * x * x;
  }
  template <class T>
  KOKKOS_FUNCTION T derivative(T x, T) const {
    return T(2 * a) * x;
  }
  template <class T>
  KOKKOS_FUNCTION T parameter_derivative(T x, T) const {
    return x * x;
  }
};
struct ParabolaMap {
  Parameter a = 1.0;
  template <class T>
  KOKKOS_FUNCTION BoundParabola bind(std::int64_t head) const {
    return {a(head)};
  }
  template <class ExecSpace>
  void validate(const char* name, std::int64_t heads) const {
    a.validate<ExecSpace>(name, heads);
  }
};
static_assert(ElementwiseFeatureMap<ParabolaMap> && ParameterizedFeatureMap<ParabolaMap>);

/// A parameter for keys only.
struct OneSided {
  static constexpr const char* name = "one-sided";
  static constexpr bool normalise_by_default = true;
  static constexpr const char* query_parameter = nullptr;
  static constexpr const char* key_parameter = "curvature";
  Parameter curvature = 1.0;
  QuadraticMap query_map() const { return {}; }
  ParabolaMap key_map() const { return {curvature}; }
};

/// phi(x) = 1 + x^2, alone and joined by exact attention inside blocks.
struct Curved : SameMapVariant<ParabolaMap> {
  static constexpr const char* name = "curved";
};
struct CurvedDiag : SameMapVariant<ParabolaMap> {
  static constexpr const char* name = "curved-diag";
  BlockDiagonal local_term() const { return {.block = 4}; }
};
static_assert(has_local_term_v<CurvedDiag> && !has_local_term_v<Curved>);

/// Maps that do not fit each other.
struct Mismatched {
  static constexpr const char* name = "mismatched";
  static constexpr bool normalise_by_default = true;
  static constexpr const char* query_parameter = nullptr;
  static constexpr const char* key_parameter = nullptr;
  ReluMap query_map() const { return {}; }
  PairMap key_map() const { return {}; }
};

template <class C>
class CustomMap : public ::testing::Test {
 public:
  using ExecSpace = typename C::ExecSpace;

  struct Tensors {
    Problem problem;
    std::vector<double> q, k, v, d_o;
  };
  static Tensors random_tensors(const Problem& p) {
    Random random(seed());
    return {p, random.normals(query_count(p)), random.normals(key_count(p)),
            random.normals(value_count(p)), random.normals(output_count(p))};
  }

  struct Result {
    std::vector<double> o, q, k, v, parameter;
  };
  template <Variant V>
  static Result run(const V& variant, const Tensors& t, const Options& options, bool gradients) {
    const Problem& p = t.problem;
    using Tensor = PlacedTensor<double, 4, ExecSpace>;
    Tensor q({p.batch, p.heads, p.nq, p.d}, Layout::gaps),
        k({p.batch, p.kv_heads, p.nk, p.d}, Layout::left);
    Tensor v({p.batch, p.kv_heads, p.nk, p.dv}, Layout::right),
        o({p.batch, p.heads, p.nq, p.dv}, Layout::gaps);
    Tensor d_o(o.extents(), Layout::left), d_q(q.extents(), Layout::gaps),
        d_k(k.extents(), Layout::left), d_v(v.extents(), Layout::gaps);
    PlacedTensor<double, 3, ExecSpace> sums({p.batch, p.heads, p.nq}, Layout::right);
    PlacedTensor<double, 1, ExecSpace> parameter({V::key_parameter ? p.kv_heads : 0}, Layout::gaps);
    q.set(t.q);
    k.set(t.k);
    v.set(t.v);
    d_o.set(t.d_o);
    const ExecSpace exec;
    const Inputs<ExecSpace, double> inputs{.q = q.input(), .k = k.input(), .v = v.input()};
    const Saved<ExecSpace, double> saved{.o = o.ref(), .denominator = sums.ref()};
    forward<double>(exec, variant, inputs, saved, options);
    if (!gradients) return {o.get(), {}, {}, {}, {}};
    Gradients<ExecSpace, double> wanted{.q = d_q.ref(), .k = d_k.ref(), .v = d_v.ref()};
    if (V::key_parameter) wanted.key_parameter = parameter.ref();
    backward<double>(exec, variant, inputs, saved, d_o.input(), wanted, options);
    EXPECT_TRUE(d_q.guards_intact() && d_k.guards_intact() && d_v.guards_intact() &&
                o.guards_intact());
    return {o.get(), d_q.get(), d_k.get(), d_v.get(), parameter.get()};
  }

  template <Variant V>
  static double loss(const V& variant, const Tensors& t, const Options& options) {
    const auto o = run(variant, t, options, false).o;
    long double sum = 0;
    for (std::size_t n = 0; n < o.size(); ++n) sum += static_cast<long double>(o[n]) * t.d_o[n];
    return static_cast<double>(sum);
  }

  /// o from the matrix of weights of the features `query` and `key` of a row.
  template <class Query, class Key>
  static std::vector<double> dense(const Tensors& t, bool causal, const Query& query,
                                   const Key& key) {
    const Problem& p = t.problem;
    std::vector<double> o(t.d_o.size());
    for (std::int64_t h = 0; h < p.batch * p.heads; ++h) {
      const std::int64_t kv = h / p.group();
      for (std::int64_t i = 0; i < p.nq; ++i) {
        const std::int64_t seen = causal ? i + 1 + p.nk - p.nq : p.nk;
        std::vector<long double> sum(static_cast<std::size_t>(p.dv));
        long double weights = 0;
        for (std::int64_t j = 0; j < seen; ++j) {
          const auto f = query(t.q.data() + (h * p.nq + i) * p.d),
                     g = key(t.k.data() + (kv * p.nk + j) * p.d);
          long double w = 0;
          for (std::size_t r = 0; r < f.size(); ++r) w += static_cast<long double>(f[r]) * g[r];
          weights += w;
          for (std::int64_t e = 0; e < p.dv; ++e)
            sum[static_cast<std::size_t>(e)] +=
                w * t.v[static_cast<std::size_t>((kv * p.nk + j) * p.dv + e)];
        }
        for (std::int64_t e = 0; e < p.dv; ++e)
          o[static_cast<std::size_t>((h * p.nq + i) * p.dv + e)] =
              static_cast<double>(sum[static_cast<std::size_t>(e)] / weights);
      }
    }
    return o;
  }

  static void expect_near(const std::vector<double>& found, const std::vector<double>& expected) {
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t n = 0; n < found.size(); ++n) ASSERT_NEAR(found[n], expected[n], 1e-13) << n;
  }

  template <Variant V>
  static void check_gradients(const V& variant, const Problem& p, const Options& options) {
    Tensors t = random_tensors(p);
    const Result result = run(variant, t, options, true);
    const std::pair<std::vector<double> Tensors::*, const std::vector<double>*> parts[] = {
        {&Tensors::q, &result.q}, {&Tensors::k, &result.k}, {&Tensors::v, &result.v}};
    for (const auto& [member, gradient] : parts)
      for (std::size_t n = 0; n < gradient->size(); ++n) {
        double& x = (t.*member)[n];
        const double centre = x;
        const auto numeric = derivative<double>(
            [&](double step) {
              x = centre + step;
              return loss(variant, t, options);
            },
            0x1p-6);
        x = centre;
        EXPECT_NEAR((*gradient)[n], numeric.value, 1e-9) << n;
      }
  }
};

TYPED_TEST_SUITE(CustomMap, OverSpaces, ConfigName);

// Blocks join any elementwise map: half of its attention and half of what they are in LLN+Diag.
TYPED_TEST(CustomMap, JoinedByBlocks) {
  for (const bool causal : {false, true}) {
    const Options options{.causal = causal};
    const Problem p{2, 2, 1, 11, 11, 3, 2};
    const auto t = this->random_tensors(p);
    const auto linear = this->run(Curved{}, t, options, false).o,
               lln = this->run(Lln{}, t, options, false).o,
               diag = this->run(LlnDiag{.block = 4}, t, options, false).o;
    std::vector<double> expected(linear.size());
    for (std::size_t n = 0; n < linear.size(); ++n)
      expected[n] = (linear[n] - lln[n]) / 2 + diag[n];
    this->expect_near(this->run(CurvedDiag{}, t, options, false).o, expected);
    this->check_gradients(CurvedDiag{}, p, options);
  }
}

TYPED_TEST(CustomMap, RowsOfMoreFeatures) {
  const auto features = [](const double* x) {
    std::vector<double> f(6);
    PairMap{}.row_value(ConstRow<double>{x, 3, 1}, Row<double>{f.data(), 6, 1});
    return f;
  };
  for (const bool causal : {false, true})
    for (const int segments : {1, 2}) {
      const Options options{.causal = causal, .chunk = 8, .segments = segments};
      const auto t = this->random_tensors({2, 4, 2, 21, 25, 3, 5});
      this->expect_near(this->run(Pairs{}, t, options, false).o,
                        this->dense(t, causal, features, features));
    }
}

TYPED_TEST(CustomMap, RowPullback) {
  for (const bool causal : {false, true})
    this->check_gradients(Pairs{}, {1, 2, 1, 5, 6, 3, 2},
                          {.causal = causal, .chunk = 4, .segments = 2});
}

TYPED_TEST(CustomMap, ParameterOnOneSide) {
  const Problem p{1, 4, 2, 9, 11, 3, 2};
  const auto t = this->random_tensors(p);
  const std::vector<double> curvature{0.7, 1.6};
  for (const bool causal : {false, true}) {
    const Options options{.causal = causal, .chunk = 4, .segments = 2};
    const auto with = [&](const std::vector<double>& values) {
      PlacedTensor<double, 1, typename TypeParam::ExecSpace> view({2}, Layout::right);
      view.set(values);
      return std::pair(this->run(OneSided{view.view()}, t, options, true),
                       this->loss(OneSided{view.view()}, t, options));
    };
    const auto [result, loss] = with(curvature);
    for (std::size_t h = 0; h < 2; ++h) {
      const auto numeric = derivative<double>(
          [&](double step) {
            auto moved = curvature;
            moved[h] += step;
            return with(moved).second;
          },
          0x1p-6);
      EXPECT_NEAR(result.parameter[h], numeric.value, 1e-9) << h;
    }
    this->check_gradients(OneSided{0.9}, {1, 2, 1, 5, 6, 3, 2}, options);
  }
}

TYPED_TEST(CustomMap, FeaturesMustAgree) {
  const typename TypeParam::ExecSpace exec;
  try {
    workspace_size<double>(exec, Mismatched{}, {1, 1, 1, 4, 4, 3, 2}, Pass::forward);
    FAIL() << "accepted";
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    for (const char* piece : {"mismatched", "3 entries", "to 3 features", "to 6"})
      EXPECT_NE(text.find(piece), std::string::npos) << text;
  }
}

}  // namespace
