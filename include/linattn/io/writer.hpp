// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <filesystem>
#include <linattn/io/array.hpp>
#include <linattn/io/value.hpp>
#include <memory>
#include <span>
#include <string>
#include <vector>

/// \file writer.hpp
/// Writes an HDF5 file that appears under its name only when it is complete.

namespace LinAttn::io {

struct WriteOptions {
  /// 0: contiguous datasets. 1 to 9: chunks of chunk_extents(), shuffled and deflated at that
  /// level.
  int deflate = 0;
};

/// Extents of the chunks in which a compressed dataset is stored: the dataset's own, or, if it is
/// larger than 16 MiB, its leading extents halved until a chunk is not, which leaves more than 8
/// MiB. HDF5 refuses chunks of 4 GiB. Every result is at least 1.
std::vector<std::int64_t> chunk_extents(std::span<const std::int64_t> extents,
                                        std::size_t element_bytes);

/// A new file in layout version 1, written beside its target as `<target>.tmp-<process>-<number>`.
///
/// commit() renames it over the target, so that a reader sees the old content or the new, never a
/// part. Without commit() the destructor removes it. Elements are row-major; groups on the way to
/// an object are made; the root attribute `schema` is set.
///
/// A full disk is reported by the call that meets it or by commit(), and leaves nothing behind.
class Writer {
 public:
  /// \throws EnvironmentFailure if the target is a directory or not a regular file, is
  /// write-protected, or its folder is missing or cannot be written.
  explicit Writer(const std::filesystem::path& target, const WriteOptions& options = {});
  Writer(Writer&&) noexcept;
  Writer& operator=(Writer&&) noexcept;
  ~Writer();

  /// Where the file will be.
  const std::filesystem::path& target() const noexcept;

  /// \throws InvalidArgument if the path is taken or malformed. \throws EnvironmentFailure if the
  /// disk refuses.
  void write(const std::string& dataset, const Array& array);

  template <Storable T>
  void write(const std::string& dataset, const std::vector<T>& values,
             std::vector<std::int64_t> extents) {
    write(dataset, Array(values, std::move(extents)));
  }

  /// Makes a group; one that exists is left as it is.
  void group(const std::string& path);

  /// Sets an attribute, in place of one of that name, on a dataset or a group (made if absent).
  void attribute(const std::string& object, const std::string& name, const Value& value);

  /// Copies all attributes of an object of another file, of any type but references, to the object
  /// of the same path (a group is made if absent). The other file may be the one that commit()
  /// replaces.
  void copy_attributes(const std::filesystem::path& source, const std::string& object);

  /// Completes the file and gives it its name. Nothing can be written afterwards.
  /// \throws EnvironmentFailure if a write, the close or the rename failed; the target is then
  /// unchanged.
  void commit();

 private:
  struct Impl;
  std::unique_ptr<Impl> m_impl;
};

}  // namespace LinAttn::io
