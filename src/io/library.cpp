// SPDX-License-Identifier: BSD-3-Clause
#include <linattn/error.hpp>
#include <linattn/io/library.hpp>

#include "hdf5_raii.hpp"

namespace LinAttn::io {

std::string library_version() {
  const hdf5::Session session;
  unsigned major = 0, minor = 0, release = 0;
  if (H5get_libversion(&major, &minor, &release) < 0) return "unknown";
  return detail::message(major, ".", minor, ".", release);
}

}  // namespace LinAttn::io
