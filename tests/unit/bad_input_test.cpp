// SPDX-License-Identifier: BSD-3-Clause

// Mistakes of the caller: one exception that names what was expected and found, and nothing
// written.

#include "attention_case.hpp"
#include "refusal.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

template <class C>
class BadInput : public ::testing::Test {
 public:
  using ExecSpace = typename C::ExecSpace;
  using Call = Attention<float, ExecSpace, Lln>;
  template <int Rank>
  using Float = PlacedTensor<float, Rank, ExecSpace>;

  void TearDown() override {
    const auto untouched = [](auto& tensor) {
      for (const auto element : tensor.get())
        if (!same_bits(element, tensor.guard())) return false;
      return true;
    };
    EXPECT_TRUE(untouched(call.d_q) && untouched(call.d_k) && untouched(call.d_v) &&
                untouched(call.d_alpha) && untouched(call.d_beta))
        << "a refused call wrote";
    EXPECT_TRUE(same_bits(call.o.get(), o_before)) << "a refused call wrote";
  }

  Workspace<ExecSpace> workspace() const { return arena.workspace(); }
  void forward(const Inputs<ExecSpace, float>& inputs, const Saved<ExecSpace, float>& saved,
               const Options& with) {
    LinAttn::forward<float>(exec, call.variant(), inputs, saved, workspace(), with);
  }
  void backward(const Inputs<ExecSpace, float>& inputs, const Saved<ExecSpace, float>& saved,
                const TensorRef<const float, 4, ExecSpace>& d_o,
                const Gradients<ExecSpace, float>& gradients) {
    LinAttn::backward<float>(exec, call.variant(), inputs, saved, d_o, gradients, workspace(),
                             options);
  }

  const Problem p{2, 4, 2, 11, 13, 5, 3};
  const Options options{.causal = true};
  const Case c = random_case<float, Lln>(p, options);
  ExecSpace exec{};
  Call call{c, options};
  Arena<ExecSpace> arena{1 << 20};
  const std::vector<float> o_before = [&] {
    call.forward();
    return call.o.get();
  }();
};

TYPED_TEST_SUITE(BadInput, OverSpaces, ConfigName);

TYPED_TEST(BadInput, ExtentsOfInputs) {
  using Float = typename TestFixture::template Float<4>;
  const auto with = [&](auto member, const Float& tensor, std::vector<std::string> pieces) {
    auto inputs = this->call.inputs();
    inputs.*member = tensor.input();
    expect_refusal([&] { this->forward(inputs, this->call.saved(), this->options); }, pieces);
    expect_refusal(
        [&] {
          this->backward(inputs, this->call.saved(), this->call.d_o.input(),
                         this->call.gradients({}));
        },
        pieces);
  };
  using In = Inputs<typename TypeParam::ExecSpace, float>;
  with(&In::k, Float({3, 2, 13, 5}, Layout::right), {"k ", "(2, 2, 13, 5)", "(3, 2, 13, 5)"});
  with(&In::k, Float({2, 2, 13, 6}, Layout::right), {"k ", "(2, 2, 13, 5)", "(2, 2, 13, 6)"});
  with(&In::v, Float({1, 2, 13, 3}, Layout::right), {"v ", "(2, 2, 13, 3)", "(1, 2, 13, 3)"});
  with(&In::v, Float({2, 4, 13, 3}, Layout::right), {"v ", "(2, 2, 13, 3)", "(2, 4, 13, 3)"});
  with(&In::v, Float({2, 2, 12, 3}, Layout::right), {"v ", "(2, 2, 13, 3)", "(2, 2, 12, 3)"});
  with(&In::q, Float({2, 3, 11, 5}, Layout::right), {"2 key/value heads", "3 query heads"});
  with(&In::q, Float({2, 4, 14, 5}, Layout::right), {"causal", "Nq = 14", "Nk = 13"});
}

TYPED_TEST(BadInput, MissingInputs) {
  using In = Inputs<typename TypeParam::ExecSpace, float>;
  for (const auto& [name, member] :
       {std::pair{"input q", &In::q}, {"input k", &In::k}, {"input v", &In::v}}) {
    auto inputs = this->call.inputs();
    inputs.*member = {};
    expect_refusal([&] { this->forward(inputs, this->call.saved(), this->options); },
                   {name, "missing"});
  }
}

TYPED_TEST(BadInput, HeadsOfNothing) {
  using Float = typename TestFixture::template Float<4>;
  auto inputs = this->call.inputs();
  const Float k({2, 0, 13, 5}, Layout::right), v({2, 0, 13, 3}, Layout::right);
  inputs.k = k.input();
  inputs.v = v.input();
  expect_refusal([&] { this->forward(inputs, this->call.saved(), this->options); },
                 {"0 key/value heads", "4 query heads"});
}

TYPED_TEST(BadInput, OutputsOfForward) {
  using ExecSpace = typename TypeParam::ExecSpace;
  using Float = typename TestFixture::template Float<4>;
  const auto refuse = [&](const Saved<ExecSpace, float>& saved, std::vector<std::string> pieces) {
    expect_refusal([&] { this->forward(this->call.inputs(), saved, this->options); }, pieces);
  };
  refuse({}, {"o ", "(2, 4, 11, 3)", "nothing"});
  const Float wide({2, 4, 11, 4}, Layout::right);
  refuse({.o = wide.ref()}, {"o ", "(2, 4, 11, 3)", "(2, 4, 11, 4)"});
  const PlacedTensor<float, 3, ExecSpace> sums({2, 4, 13}, Layout::right);
  refuse({.o = this->call.o.ref(), .denominator = sums.ref()},
         {"denominator", "(2, 4, 11)", "(2, 4, 13)"});
  const TensorRef<float, 4, ExecSpace> broadcast(this->call.o.ref().data(), {2, 4, 11, 3},
                                                 {0, 33, 3, 1});
  refuse({.o = broadcast}, {"o ", "stride 0", "dimension 0", "(2, 4, 11, 3)"});
}

TYPED_TEST(BadInput, ArgumentsOfBackward) {
  using ExecSpace = typename TypeParam::ExecSpace;
  using Float = typename TestFixture::template Float<4>;
  using Grad = Gradients<ExecSpace, float>;
  auto& call = this->call;
  const auto refuse = [&](const Saved<ExecSpace, float>& saved,
                          const TensorRef<const float, 4, ExecSpace>& d_o, const Grad& gradients,
                          std::vector<std::string> pieces) {
    expect_refusal([&] { this->backward(call.inputs(), saved, d_o, gradients); }, pieces);
  };
  const auto good = call.saved();
  const auto d_o = call.d_o.input();
  const Float other({2, 4, 11, 5}, Layout::right);
  refuse(good, other.input(), call.gradients({}), {"d_o", "(2, 4, 11, 3)", "(2, 4, 11, 5)"});
  refuse(good, {}, call.gradients({}), {"d_o", "(2, 4, 11, 3)", "nothing"});
  refuse({.denominator = good.denominator}, d_o, call.gradients({}), {"saved o", "nothing"});
  refuse({.o = good.o}, d_o, call.gradients({}), {"saved denominator", "(2, 4, 11)", "nothing"});

  const Float q({2, 4, 11, 6}, Layout::right), k({2, 4, 13, 5}, Layout::right),
      v({2, 2, 13, 4}, Layout::right);
  const PlacedTensor<double, 1, ExecSpace> alpha({2}, Layout::right), beta({4}, Layout::right);
  refuse(good, d_o, {.q = q.ref()}, {"gradient of q", "(2, 4, 11, 5)", "(2, 4, 11, 6)"});
  refuse(good, d_o, {.k = k.ref()}, {"gradient of k", "(2, 2, 13, 5)", "(2, 4, 13, 5)"});
  refuse(good, d_o, {.v = v.ref()}, {"gradient of v", "(2, 2, 13, 3)", "(2, 2, 13, 4)"});
  refuse(good, d_o, {.query_parameter = alpha.ref()}, {"alpha", "(4)", "(2)"});
  refuse(good, d_o, {.key_parameter = beta.ref()}, {"beta", "(2)", "(4)"});
  const TensorRef<float, 4, ExecSpace> broadcast(call.d_k.ref().data(), {2, 2, 13, 5},
                                                 {130, 0, 5, 1});
  refuse(good, d_o, {.k = broadcast}, {"gradient of k", "stride 0", "dimension 1"});
}

TYPED_TEST(BadInput, GradientOfAParameterThatIsNotThere) {
  using ExecSpace = typename TypeParam::ExecSpace;
  const PlacedTensor<double, 1, ExecSpace> alpha({4}, Layout::right), beta({2}, Layout::right);
  const auto run = [&](const Gradients<ExecSpace, float>& gradients) {
    LinAttn::backward<float>(this->exec, Elu{}, this->call.inputs(), this->call.saved(),
                             this->call.d_o.input(), gradients, this->workspace(), this->options);
  };
  expect_refusal([&] { run({.query_parameter = alpha.ref()}); }, {"elu", "no query parameter"});
  expect_refusal([&] { run({.key_parameter = beta.ref()}); }, {"elu", "no key parameter"});
}

TYPED_TEST(BadInput, KeyMask) {
  using ExecSpace = typename TypeParam::ExecSpace;
  auto inputs = this->call.inputs();
  const PlacedTensor<std::uint8_t, 2, ExecSpace> mask({2, 11}, Layout::right);
  inputs.key_mask = mask.input();
  expect_refusal([&] { this->forward(inputs, this->call.saved(), this->options); },
                 {"key_mask", "(2, 13)", "(2, 11)"});
}

// B34, B35: packed sequences of one batch entry, told by offsets that make sense.
TYPED_TEST(BadInput, PackedSequences) {
  using ExecSpace = typename TypeParam::ExecSpace;
  using Float = typename TestFixture::template Float<4>;
  const Float q({1, 4, 11, 5}, Layout::right), k({1, 2, 13, 5}, Layout::right),
      v({1, 2, 13, 3}, Layout::right), o({1, 4, 11, 3}, Layout::right);
  const auto offsets = [](const std::vector<std::int64_t>& x, std::int64_t stride = 1) {
    const auto count = (static_cast<std::int64_t>(x.size()) + stride - 1) / stride;
    return SequenceOffsets(x.data(), {count}, {stride});
  };
  const auto refuse = [&](const std::vector<std::int64_t>& of_q,
                          const std::vector<std::int64_t>& of_k, std::vector<std::string> pieces) {
    Inputs<ExecSpace, float> inputs{.q = q.input(), .k = k.input(), .v = v.input()};
    if (!of_q.empty()) inputs.cu_seqlens_q = offsets(of_q);
    if (!of_k.empty()) inputs.cu_seqlens_k = offsets(of_k);
    expect_refusal([&] { this->forward(inputs, {.o = o.ref()}, this->options); }, pieces);
  };
  refuse({0, 11}, {}, {"together", "only cu_seqlens_q"});
  refuse({}, {0, 13}, {"together", "only cu_seqlens_k"});
  refuse({0, 5, 11}, {0, 13}, {"same number", "3 and 2"});
  refuse({1, 11}, {0, 13}, {"cu_seqlens_q", "start at 0", "found 1"});
  refuse({0, 11}, {2, 13}, {"cu_seqlens_k", "start at 0", "found 2"});
  refuse({0, 7, 4, 11}, {0, 8, 9, 13}, {"cu_seqlens_q", "decrease", "7 then 4", "entry 2"});
  refuse({0, 12}, {0, 13}, {"cu_seqlens_q", "end at 11", "found 12"});
  refuse({0, 11}, {0, 12}, {"cu_seqlens_k", "end at 13", "found 12"});
  refuse({0, 8, 11}, {0, 7, 13}, {"causal", "Nq = 8", "Nk = 7", "member 0"});

  Inputs<ExecSpace, float> inputs{.q = q.input(), .k = k.input(), .v = v.input()};
  const std::vector<std::int64_t> spread{0, 99, 11, 99}, keys{0, 13};
  inputs.cu_seqlens_q = offsets(spread, 2);
  inputs.cu_seqlens_k = offsets(keys);
  expect_refusal([&] { this->forward(inputs, {.o = o.ref()}, this->options); },
                 {"cu_seqlens_q", "contiguous", "stride 2"});
  const PlacedTensor<std::uint8_t, 2, ExecSpace> mask({1, 13}, Layout::right);
  const std::vector<std::int64_t> queries{0, 11};
  inputs.cu_seqlens_q = offsets(queries);
  inputs.key_mask = mask.input();
  expect_refusal([&] { this->forward(inputs, {.o = o.ref()}, this->options); },
                 {"key_mask", "cu_seqlens"});

  auto two = this->call.inputs();
  two.cu_seqlens_q = offsets(queries);
  two.cu_seqlens_k = offsets(keys);
  expect_refusal([&] { this->forward(two, this->call.saved(), this->options); },
                 {"cu_seqlens", "B = 1", "found B = 2"});
  Problem packed = this->p;
  packed.members = 3;
  expect_refusal([&] { plan<float>(this->exec, Elu{}, packed, Pass::forward, {}); },
                 {"B = 1", "B = 2", "3 members"});
}

// B35: a state for every sequence and key head, complete, of the right extents.
TYPED_TEST(BadInput, States) {
  using ExecSpace = typename TypeParam::ExecSpace;
  using Float = typename TestFixture::template Float<4>;
  using Sums = PlacedTensor<float, 3, ExecSpace>;
  using Shifts = PlacedTensor<int, 3, ExecSpace>;
  auto& call = this->call;
  const Float S({2, 2, 5, 3}, Layout::right), few({1, 2, 5, 3}, Layout::right),
      turned({2, 2, 3, 5}, Layout::right);
  const Sums z({2, 2, 5}, Layout::right), few_z({2, 4, 5}, Layout::right);
  const Shifts shift({2, 2, 5}, Layout::right), few_shifts({2, 2, 4}, Layout::right);
  const auto refuse = [&](const State<ExecSpace, float>& state, std::vector<std::string> pieces) {
    auto inputs = call.inputs();
    inputs.state = state.as_const();
    auto expect = [&](std::string which, const auto& body) {
      auto all = pieces;
      all.push_back(which);
      expect_refusal(body, all);
    };
    expect("initial state", [&] { this->forward(inputs, call.saved(), this->options); });
    auto saved = call.saved();
    saved.state = state;
    expect("final state", [&] { this->forward(call.inputs(), saved, this->options); });
    expect("cotangent of the final state", [&] {
      LinAttn::backward<float>(this->exec, call.variant(), call.inputs(), call.saved(),
                               Cotangents<ExecSpace, float>{call.d_o.input(), state.as_const()},
                               call.gradients({}), this->workspace(), this->options);
    });
  };
  refuse({few.ref(), z.ref(), shift.ref()}, {"S of the", "(2, 2, 5, 3)", "(1, 2, 5, 3)"});
  refuse({turned.ref(), z.ref(), shift.ref()}, {"S of the", "(2, 2, 5, 3)", "(2, 2, 3, 5)"});
  refuse({S.ref(), few_z.ref(), shift.ref()}, {"z of the", "(2, 2, 5)", "(2, 4, 5)"});
  refuse({S.ref(), z.ref(), few_shifts.ref()}, {"shift of the", "(2, 2, 5)", "(2, 2, 4)"});
  refuse({S.ref(), {}, shift.ref()}, {"z of the", "nothing"});
  refuse({{}, z.ref(), shift.ref()}, {"S of the", "nothing"});
  refuse({S.ref(), z.ref(), {}}, {"shift of the", "nothing"});

  auto gradients = call.gradients({});
  gradients.state = {.S = S.ref(), .z = z.ref()};
  expect_refusal([&] { this->backward(call.inputs(), call.saved(), call.d_o.input(), gradients); },
                 {"gradient of the initial state", "none"});
  auto inputs = call.inputs();
  inputs.state = State<ExecSpace, float>{S.ref(), z.ref(), shift.ref()}.as_const();
  gradients.state.S = few.ref();
  expect_refusal([&] { this->backward(inputs, call.saved(), call.d_o.input(), gradients); },
                 {"gradient of S", "(2, 2, 5, 3)", "(1, 2, 5, 3)"});
}

TYPED_TEST(BadInput, Parameters) {
  using ExecSpace = typename TypeParam::ExecSpace;
  const PlacedTensor<double, 1, ExecSpace> three({3}, Layout::right);
  const auto run = [&](const Lln& variant) {
    LinAttn::forward<float>(this->exec, variant, this->call.inputs(), this->call.saved(),
                            this->workspace(), this->options);
  };
  expect_refusal([&] { run(Lln{three.view(), 1.0}); }, {"alpha", "4 heads", "found 3"});
  expect_refusal([&] { run(Lln{1.0, three.view()}); }, {"beta", "2 heads", "found 3"});
  expect_refusal(
      [&] {
        run(Lln{std::numeric_limits<double>::quiet_NaN(), 1.0});
      },
      {"alpha", "finite", "nan"});
  expect_refusal(
      [&] {
        run(Lln{1.0, std::numeric_limits<double>::infinity()});
      },
      {"beta", "finite", "inf"});
  expect_refusal([&] { run(Lln{-1e39, 1.0}); }, {"alpha", "at most 1e+30", "found -1e+39"});
}

TYPED_TEST(BadInput, OptionsOutOfRange) {
  const auto run = [&](const Options& with) {
    this->forward(this->call.inputs(), this->call.saved(), with);
  };
  expect_refusal([&] { run({.causal = true, .chunk = -1}); }, {"chunk", "found -1"});
  expect_refusal([&] { run({.causal = true, .chunk = 1 << 20}); }, {"chunk", "found 1048576"});
  expect_refusal([&] { run({.causal = true, .segments = -4}); }, {"segments", "found -4"});
  expect_refusal([&] { run({.causal = true, .tiles = -2}); }, {"tiles", "found -2"});
  expect_refusal([&] { run({.scale = std::numeric_limits<double>::infinity()}); },
                 {"scale", "inf"});
  expect_refusal([&] { run({.scale = std::numeric_limits<double>::quiet_NaN()}); },
                 {"scale", "nan"});
}

TYPED_TEST(BadInput, ExtentsOfAProblem) {
  const auto ask = [&](const Problem& problem, bool causal, std::vector<std::string> pieces) {
    for (const Pass pass : {Pass::forward, Pass::backward}) {
      const Options with{.causal = causal};
      expect_refusal([&] { plan<float>(this->exec, Elu{}, problem, pass, with); }, pieces);
      expect_refusal([&] { workspace_size<float>(this->exec, Elu{}, problem, pass, with); },
                     pieces);
    }
  };
  ask({-1, 4, 2, 11, 13, 5, 3}, false, {"negative", "B=-1"});
  ask({2, 4, 2, 11, 13, 5, -3}, false, {"negative", "Dv=-3"});
  ask({2, 4, 3, 11, 13, 5, 3}, false, {"3 key/value heads", "4 query heads"});
  ask({2, 0, 3, 11, 13, 5, 3}, false, {"3 key/value heads", "0 query heads"});
  ask({2, 4, 2, 14, 13, 5, 3}, true, {"Nq = 14", "Nk = 13"});
  ask({2, 4, 2, 11, 13, 70000, 3}, false, {"D=70000"});
  ask({2, 4, 2, 11, 13, 5, 70000}, false, {"Dv=70000"});
  ask({std::int64_t(1) << 62, 4, 2, 11, 13, 5, 3}, false, {"no memory", "B=4611686018427387904"});
  ask({2, 4, 2, std::int64_t(1) << 60, std::int64_t(1) << 60, 5, 3}, true, {"no memory", "Nq=1152921504606846976"});
  ask({1, 4, 2, 11, 13, 5, 3, -2}, false, {"packed", "found -2"});
  ask({1, 4, 2, 11, 13, 5, 3, 4, -1, 2}, false, {"4 packed members", "-1 queries"});
  ask({1, 4, 2, 11, 13, 5, 3, 4, 3, 14}, false, {"4 packed members", "14 keys"});
}

// Extents without an address.
TYPED_TEST(BadInput, TensorsWithoutMemory) {
  using ExecSpace = typename TypeParam::ExecSpace;
  const TensorRef<const float, 4, ExecSpace> nowhere(nullptr, {2, 4, 11, 5}, {220, 55, 5, 1});
  auto inputs = this->call.inputs();
  inputs.q = nowhere;
  expect_refusal([&] { this->forward(inputs, this->call.saved(), this->options); }, {"q", "(2, 4, 11, 5)", "no memory"});
  auto saved = this->call.saved();
  saved.o = TensorRef<float, 4, ExecSpace>(nullptr, {2, 4, 11, 3}, {132, 33, 3, 1});
  expect_refusal([&] { this->forward(this->call.inputs(), saved, this->options); }, {"o", "(2, 4, 11, 3)", "no memory"});
  using Bytes = Kokkos::View<std::byte*, typename ExecSpace::memory_space, Kokkos::MemoryTraits<Kokkos::Unmanaged>>;
  const Workspace<ExecSpace> nothing(Bytes(nullptr, std::size_t(1) << 30));
  expect_refusal(
      [&] {
        LinAttn::forward<float>(this->exec, this->call.variant(), this->call.inputs(), this->call.saved(), nothing,
                                this->options);
      },
      {"workspace", "no memory"});
}

// Exactly the bytes asked for are enough, one less is not.
TYPED_TEST(BadInput, WorkspaceTooSmall) {
  using ExecSpace = typename TypeParam::ExecSpace;
  auto& call = this->call;
  for (const Pass pass : {Pass::forward, Pass::backward}) {
    const std::size_t needed = call.workspace_bytes(pass);
    ASSERT_GT(needed, 0u);
    for (const std::size_t bytes : {std::size_t(0), needed / 2, needed - 1}) {
      const Arena<ExecSpace> small(bytes);
      expect_refusal(
          [&] {
            if (pass == Pass::forward)
              LinAttn::forward<float>(this->exec, call.variant(), call.inputs(), call.saved(),
                                      small.workspace(), this->options);
            else
              LinAttn::backward<float>(this->exec, call.variant(), call.inputs(), call.saved(),
                                       call.d_o.input(), call.gradients({}), small.workspace(),
                                       this->options);
          },
          {"workspace", std::to_string(needed) + " bytes", "found " + std::to_string(bytes),
           "Nq=11", "Nk=13"});
    }
    expect_refusal(
        [&] {
          LinAttn::forward<float>(this->exec, call.variant(), call.inputs(), call.saved(),
                                  Workspace<ExecSpace>(), this->options);
        },
        {"workspace", "found 0"});
  }
}

}  // namespace
