// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>
#include <filesystem>
#include <linattn/io/array.hpp>
#include <linattn/io/value.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

/// \file reader.hpp
/// Reads datasets and attributes of any HDF5 file by their path.

namespace LinAttn::io {

/// What a file may make the reader allocate. A file that claims more is refused before any
/// allocation.
struct ReadLimits {
  /// Bytes of all datasets read through one Reader; never more than the machine's memory.
  std::uint64_t total_bytes = std::uint64_t{64} << 30;
  /// Largest ratio of a dataset's size to what the file stores of it, above 64 MiB. Deflate reaches
  /// about 1030; a file far beyond it holds nothing but its own claim.
  std::uint64_t expansion = 2048;
};

/// Description of a dataset without its elements.
struct DatasetInfo {
  std::string type;                    ///< as a message names it: "float32", "int16", "string"
  std::optional<ElementType> element;  ///< type of the Array that read() returns, if it can be read
  std::vector<std::int64_t> extents;
  bool exact = false;  ///< the file stores `element` itself, not a narrower or wider integer
};

enum class ObjectKind { absent, group, dataset, other };

/// An HDF5 file opened for reading.
///
/// Elements come in native byte order whatever the file's; float16 as bits. Only this file is read:
/// external links, external storage and virtual datasets are errors. Locking is used where the file
/// system offers it and given up where it does not. HDF5 calls of all readers and writers exclude
/// one another; HDF5 used elsewhere in the process, at the same time, needs a thread-safe HDF5.
/// HDF5's own error printing is off inside each call and as the caller left it afterwards.
///
/// Every message is one line that starts with the file's name and has the path inside the file.
class Reader {
 public:
  /// \throws EnvironmentFailure if there is no such file, it is a directory, it cannot be read or
  /// another process has locked it. \throws InvalidArgument if it is not HDF5, or is truncated or
  /// damaged.
  explicit Reader(const std::filesystem::path& file, const ReadLimits& limits = {});
  Reader(Reader&&) noexcept;
  Reader& operator=(Reader&&) noexcept;
  ~Reader();

  const std::filesystem::path& file() const noexcept;

  /// \throws InvalidArgument if the path meets an external link, or a soft link that leads nowhere.
  ObjectKind kind(const std::string& path) const;

  /// Names of the links in a group, sorted. \throws InvalidArgument if it is not a group.
  std::vector<std::string> children(const std::string& group) const;

  /// Names of the attributes of a group or dataset, sorted.
  std::vector<std::string> attribute_names(const std::string& object) const;

  /// A scalar, or an array of one element: an integer, a real number, a boolean (an enumeration as
  /// h5py writes it, read as 0 or 1) or a string in any of HDF5's forms.
  /// \throws InvalidArgument if it is absent or something else.
  Value attribute(const std::string& object, const std::string& name) const;

  /// \throws InvalidArgument if there is no such dataset.
  DatasetInfo describe(const std::string& dataset) const;

  /// All elements. Integers other than uint8 come as int64.
  /// \throws InvalidArgument if there is no such dataset, its type has no ElementType, it is larger
  /// than the limits or the file allow, or its data cannot be decoded.
  Array read(const std::string& dataset) const;

  /// \private
  struct Impl;
  /// \private
  const Impl& impl() const noexcept { return *m_impl; }

 private:
  std::unique_ptr<Impl> m_impl;
};

}  // namespace LinAttn::io
