// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <linattn/io/reader.hpp>

#include "hdf5_raii.hpp"

namespace LinAttn::io {

struct Reader::Impl {
  std::filesystem::path file;
  ReadLimits limits;
  std::uint64_t bytes_read = 0;
  hdf5::Handle handle;

  /// The object at a path, reached without leaving the file; an invalid handle if there is none.
  /// \throws InvalidArgument as Reader::kind().
  hdf5::Handle find(const std::string& path) const;

  /// The same, but absent is an error. `expected` completes "expected ..., found nothing".
  hdf5::Handle open(const std::string& path, const char* expected) const;

  /// \throws InvalidArgument "<file>: <object>: <text>".
  [[noreturn]] void fail(const std::string& object, const std::string& text) const;
};

/// The in-memory type of native byte order that holds elements of this type, the bits of float16
/// included. \throws nothing; an invalid handle if HDF5 fails.
hdf5::Handle native_type(ElementType type);

/// IEEE 754 binary16 in the given byte order.
hdf5::Handle half_type(H5T_order_t order);

}  // namespace LinAttn::io
