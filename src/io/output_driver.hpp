// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "hdf5_raii.hpp"

/// \file output_driver.hpp
/// The file driver through which the library writes. Private.
///
/// HDF5 (1.10 and 1.14 alike) cannot close a file whose last writes fail: the identifier stays open
/// and the library crashes when the process ends. A full disk must not do that to a program, so
/// this driver remembers the first failure, drops what follows and tells HDF5 that all is well. Who
/// owns the file asks error() before believing in it.

namespace LinAttn::io {

/// An open descriptor and what became of it.
class OutputStream {
 public:
  explicit OutputStream(int descriptor) : m_descriptor(descriptor) {}
  ~OutputStream();
  OutputStream(const OutputStream&) = delete;
  OutputStream& operator=(const OutputStream&) = delete;

  /// errno of the first failed call; 0 if none failed.
  int error() const noexcept { return m_error; }

  void write(const void* bytes, std::size_t count, std::uint64_t at) noexcept;
  /// Zeros where the file ends.
  bool read(void* bytes, std::size_t count, std::uint64_t at) const noexcept;
  void truncate(std::uint64_t size) noexcept;

  /// Sends everything to the disk and closes the descriptor; failures go to error().
  void finish() noexcept;

 private:
  int m_descriptor;
  int m_error = 0;
};

/// A file-access property list that makes H5Fcreate write to the stream. The stream must live until
/// the file is closed. The list and the driver identifier it needs are closed together.
struct OutputAccess {
  hdf5::Handle driver;
  hdf5::Handle list;
};
OutputAccess output_access(OutputStream& stream);

}  // namespace LinAttn::io
