// SPDX-License-Identifier: BSD-3-Clause

// Prints a digest of every bit of forward and backward for a list of calls on the default host
// execution space, and the number of its threads first. determinism_test compares the digests of
// runs with different numbers of threads.

#include <cstdio>

#include "attention_case.hpp"

namespace {

using namespace LinAttn;
using namespace LinAttn::test_support;
using ExecSpace = Kokkos::DefaultHostExecutionSpace;

class Digest {
 public:
  template <class T>
  void add(const std::vector<T>& x) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(x.data());
    for (std::size_t n = 0; n < x.size() * sizeof(T); ++n)
      m_hash = (m_hash ^ bytes[n]) * 0x100000001b3u;
  }
  unsigned long long value() const { return m_hash; }

 private:
  std::uint64_t m_hash = 0xcbf29ce484222325u;
};

template <class T, Variant V>
void print(const Problem& p, const Options& options) {
  const auto outcome = attend<T, ExecSpace, V>(random_case<T, V>(p, options), options);
  Digest digest;
  digest.add(outcome.o);
  digest.add(outcome.denominator);
  digest.add(outcome.q);
  digest.add(outcome.k);
  digest.add(outcome.v);
  digest.add(outcome.alpha);
  digest.add(outcome.beta);
  digest.add(outcome.constant);
  digest.add(outcome.scale);
  std::printf("%s %s %zu %016llx\n", V::name, describe(p, options).c_str(), sizeof(T),
              digest.value());
}

}  // namespace

int main(int argc, char** argv) {
  const Kokkos::ScopeGuard guard(argc, argv);
  std::printf("threads %d\n", LinAttn::detail::concurrency(ExecSpace()));
  for_each_variant([]<class V>(std::type_identity<V>) {
    for (const bool causal : {false, true})
      for (const int segments : {1, 3})
        for (Problem p : {Problem{1, 1, 1, 300, 300, 9, 11}, Problem{2, 6, 3, 130, 170, 6, 5}}) {
          if (has_local_term_v<V> && !causal) p.nq = p.nk;
          const double noise = has_local_term_v<V> || ExactVariant<V> ? 0 : 0.2;
          print<float, V>(p, {.causal = causal, .segments = segments});
          print<double, V>(p, {.causal = causal, .segments = segments, .dropout = {.p = noise}});
        }
  });
  return 0;
}
