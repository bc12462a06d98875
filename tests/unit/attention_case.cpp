// SPDX-License-Identifier: BSD-3-Clause

#define LINATTN_DEFINES_TEST_INSTANTIATIONS
#include "attention_case.hpp"

LINATTN_TEST_INSTANTIATE_ALL()
