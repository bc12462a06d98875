// SPDX-License-Identifier: BSD-3-Clause
#define LINATTN_DEFINES_INSTANTIATIONS
#include <linattn/instantiations.hpp>

LINATTN_INSTANTIATE(, LinAttn::Lln)
LINATTN_INSTANTIATE(, LinAttn::LlnDiag)
LINATTN_INSTANTIATE(, LinAttn::Performer)
