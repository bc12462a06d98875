// SPDX-License-Identifier: BSD-3-Clause
//
// One call, and at most one mistake in it, chosen by a definition.

#include <linattn/analysis/diagnose.hpp>
#include <linattn/linattn.hpp>

using Exec = Kokkos::DefaultHostExecutionSpace;
template <class T>
using Tensor = Kokkos::View<T****, Kokkos::HostSpace>;

#if defined(LINATTN_MISTAKE_NOT_A_MAP)
struct NotAMap {
  int value;
};
struct Broken : LinAttn::SameMapVariant<NotAMap> {
  static constexpr const char* name = "broken";
};
#endif

void attend(Tensor<float> x, Tensor<const float> y, Tensor<int> z, Kokkos::View<float***, Kokkos::HostSpace> s,
            Kokkos::View<std::byte*, Kokkos::HostSpace> arena) {
  (void)y, (void)z;
#if defined(LINATTN_MISTAKE_RANK)
  LinAttn::forward<float>(Exec(), LinAttn::Elu{}, {.q = x, .k = x, .v = x}, {.o = s, .denominator = s}, arena);
#elif defined(LINATTN_MISTAKE_CONST_OUTPUT)
  LinAttn::forward<float>(Exec(), LinAttn::Elu{}, {.q = x, .k = x, .v = x}, {.o = y, .denominator = s}, arena);
#elif defined(LINATTN_MISTAKE_ELEMENT_TYPE)
  LinAttn::forward<float>(Exec(), LinAttn::Elu{}, {.q = z, .k = x, .v = x}, {.o = x, .denominator = s}, arena);
#elif defined(LINATTN_MISTAKE_WORKSPACE)
  Kokkos::View<double*, Kokkos::HostSpace> wide("wide", 100);
  LinAttn::forward<float>(Exec(), LinAttn::Elu{}, {.q = x, .k = x, .v = x}, {.o = x, .denominator = s},
                          LinAttn::Workspace<Exec>(wide));
#elif defined(LINATTN_MISTAKE_PARAMETER)
  LinAttn::forward<float>(Exec(), LinAttn::Lln{.alpha = s, .beta = 1.0}, {.q = x, .k = x, .v = x},
                          {.o = x, .denominator = s}, arena);
#elif defined(LINATTN_MISTAKE_STORAGE)
  LinAttn::forward<int>(Exec(), LinAttn::Elu{}, {.q = z, .k = z, .v = z}, {.o = z}, arena);
#elif defined(LINATTN_MISTAKE_NOT_A_MAP)
  LinAttn::forward<float>(Exec(), Broken{}, {.q = x, .k = x, .v = x}, {.o = x, .denominator = s}, arena);
#elif defined(LINATTN_MISTAKE_TWO_MATRICES)
  LinAttn::diagnose<float>(Exec(), LinAttn::LlnDiag{}, {.q = x, .k = x});
#else
  LinAttn::forward<float>(Exec(), LinAttn::Elu{}, {.q = x, .k = x, .v = x}, {.o = x, .denominator = s}, arena);
  LinAttn::diagnose<float>(Exec(), LinAttn::Lln{}, {.q = x, .k = x});
#endif
}
