// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/io/array.hpp>
#include <linattn/io/library.hpp>
#include <linattn/io/reader.hpp>
#include <linattn/io/tensor_file.hpp>
#include <linattn/io/value.hpp>
#include <linattn/io/variant_table.hpp>
#include <linattn/io/views.hpp>
#include <linattn/io/writer.hpp>

/// \file io.hpp
/// All of LinAttn::io.
