// SPDX-License-Identifier: BSD-3-Clause

// Mistakes of the caller: one exception that names what was expected and found, and nothing
// written.

#include "attention_case.hpp"
#include "spaces.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;

/// Runs the body and checks that it throws InvalidArgument whose message has all the given pieces.
template <class Body>
void expect_refusal(const Body& body, const std::vector<std::string>& pieces) {
  try {
    body();
    ADD_FAILURE() << "accepted, but expected a message with '" << pieces.front() << "'";
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.rfind("LinAttn: ", 0), 0u) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    for (const std::string& piece : pieces)
      EXPECT_NE(text.find(piece), std::string::npos) << "no '" << piece << "' in: " << text;
  }
}

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
}

TYPED_TEST(BadInput, OptionsOutOfRange) {
  const auto run = [&](const Options& with) {
    this->forward(this->call.inputs(), this->call.saved(), with);
  };
  expect_refusal([&] { run({.causal = true, .chunk = -1}); }, {"chunk", "found -1"});
  expect_refusal([&] { run({.causal = true, .chunk = 1 << 20}); }, {"chunk", "found 1048576"});
  expect_refusal([&] { run({.causal = true, .segments = -4}); }, {"segments", "found -4"});
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
