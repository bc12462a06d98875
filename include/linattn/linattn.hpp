// SPDX-License-Identifier: BSD-3-Clause
#pragma once

/// \file linattn.hpp
/// Everything of the core: include this, or the parts you need.

#include <linattn/affine.hpp>
#include <linattn/attention.hpp>
#include <linattn/call.hpp>
#include <linattn/dropout.hpp>
#include <linattn/error.hpp>
#include <linattn/feature_map.hpp>
#include <linattn/instantiations.hpp>
#include <linattn/normaliser.hpp>
#include <linattn/plan.hpp>
#include <linattn/problem.hpp>
#include <linattn/state.hpp>
#include <linattn/tensor.hpp>
#include <linattn/variant.hpp>
#include <linattn/variants.hpp>
#include <linattn/version.hpp>
#include <linattn/workspace.hpp>
