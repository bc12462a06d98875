// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <string>

/// \file library.hpp
/// The HDF5 behind LinAttn::io.

namespace LinAttn::io {

/// Version of the HDF5 library that is linked, as "1.10.8".
std::string library_version();

}  // namespace LinAttn::io
