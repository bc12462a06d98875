// SPDX-License-Identifier: BSD-3-Clause
//
// A user's program with feature maps of its own; docs/adding-a-variant.md quotes it.

#include <cstdio>
#include <linattn/baselines/linformer.hpp>
#include <linattn/baselines/nystrom.hpp>
#include <linattn/linattn.hpp>
#if defined(CONSUMER_WITH_IO)
#include <linattn/io/io.hpp>
#endif

#include "cosine.hpp"
#include "gradient_check.hpp"
#include "sharp_softplus.hpp"
#include "softplus.hpp"

namespace {

int failures = 0;

void report(const char* what, double error, bool passed) {
  std::printf("%-28s %.1e  %s\n", what, error, passed ? "ok" : "WRONG");
  failures += !passed;
}

void report(const char* what, double error) { report(what, error, error < 1e-8); }

/// A mistake of one part in a thousand, which the check has to see.
struct WrongMap : SoftplusMap {
  template <class T>
  KOKKOS_FUNCTION T derivative(T x, T f) const {
    return T(1.001) * SoftplusMap::derivative(x, f);
  }
};
struct Wrong : LinAttn::SameMapVariant<WrongMap> {
  static constexpr const char* name = "wrong";
};

void check_gradients() {
  // chunks of two tokens, so that a small problem has several, in two segments and in one
  const LinAttn::Options full{.chunk = 2, .segments = 2};
  const LinAttn::Options causal{.causal = true, .chunk = 2, .segments = 2};
  const LinAttn::Options unnormalised{
      .causal = true, .normalise = false, .scale = 0.5, .chunk = 2, .segments = 1};
  for (const LinAttn::Options& options : {full, causal, unnormalised})
    report("softplus", gradient_error(Softplus{}, options));

  for (const LinAttn::Options& options : {full, causal, unnormalised})
    report("cosine", gradient_error(Cosine{}, options));

  // one rate for each of four query heads and two key/value heads
  const Kokkos::View<double*, Kokkos::HostSpace> query_rate("query_rate", 4);
  const Kokkos::View<double*, Kokkos::HostSpace> key_rate("key_rate", 2);
  for (int h = 0; h < 4; ++h) query_rate(h) = 0.5 + 0.3 * h;
  for (int h = 0; h < 2; ++h) key_rate(h) = 1.1 - 0.4 * h;
  const SharpSoftplus sharp{.query_rate = query_rate, .key_rate = key_rate};
  for (const LinAttn::Options& options : {full, causal, unnormalised})
    report("sharp-softplus", gradient_error(sharp, options, query_rate, key_rate));

  for (const LinAttn::Options& options : {full, causal, unnormalised}) {
    const double error = gradient_error(Wrong{}, options);
    report("wrong by 0.1 %, must be seen", error, error > 1e-4);
  }
}

/// The installed baselines: sizes of workspaces, from the library.
void check_baselines() {
  namespace baselines = LinAttn::baselines;
  const Kokkos::DefaultHostExecutionSpace exec;
  const LinAttn::Problem p{.batch = 1, .heads = 2, .kv_heads = 2, .nq = 90, .nk = 90, .d = 8, .dv = 8};
  report("nystrom", 0, baselines::workspace_size<float>(exec, baselines::Nystrom{}, p, LinAttn::Pass::backward) > 0);
  const auto bytes = baselines::workspace_size<float>(exec, baselines::Linformer{}, p, 16, LinAttn::Pass::backward);
  report("linformer", 0, bytes > 0);
}

#if defined(CONSUMER_WITH_IO)
/// A file written and read again through LinAttn::io.
void check_files() {
  const Kokkos::DefaultHostExecutionSpace exec;
  const Kokkos::View<float****, Kokkos::LayoutLeft, Kokkos::HostSpace> q("q", 1, 4, 3, 2);
  for (int i = 0; i < 24; ++i) q.data()[i] = static_cast<float>(i);
  {
    LinAttn::io::Writer writer("consumer.h5");
    writer.write("/inputs/q", LinAttn::io::to_array(exec, q));
    writer.write("/inputs/k", std::vector<float>(10), {1, 1, 5, 2});
    writer.write("/inputs/v", std::vector<float>(35), {1, 1, 5, 7});
    writer.commit();
  }
  const auto file = LinAttn::io::TensorFile::read("consumer.h5", {.variant = "elu"});
  const Kokkos::View<float****, Kokkos::LayoutRight, Kokkos::HostSpace> again("again", 1, 4, 3, 2);
  LinAttn::io::copy_into(exec, file.q(), again);
  double difference = file.problem().group() == 4 && file.problem().dv == 7 ? 0 : 1;
  for (int h = 0; h < 4; ++h)
    for (int i = 0; i < 3; ++i)
      for (int d = 0; d < 2; ++d) difference += again(0, h, i, d) != q(0, h, i, d);
  report("file", difference, difference == 0);
}
#endif

}  // namespace

int main(int argc, char** argv) {
  const Kokkos::ScopeGuard guard(argc, argv);
  std::printf("LinAttn %s on %s\n", LINATTN_VERSION, Kokkos::DefaultHostExecutionSpace::name());
  check_gradients();
  check_baselines();
#if defined(CONSUMER_WITH_IO)
  check_files();
#endif
  return failures == 0 ? 0 : 1;
}
