// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <gtest/gtest.h>
#include <hdf5.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

/// \file io_support.hpp
/// A temporary folder, and files made with the plain C interface of HDF5: the library under test
/// has no part in what its reader is shown.

namespace LinAttn::test_support {

/// A folder that is removed with everything in it.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = ::testing::TempDir() + "linattn-io-XXXXXX";
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    m_path = pattern;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(m_path, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  std::filesystem::path operator/(const std::string& name) const { return m_path / name; }

  std::vector<std::string> names() const {
    std::vector<std::string> result;
    for (const auto& entry : std::filesystem::directory_iterator(m_path))
      result.push_back(entry.path().filename().string());
    return result;
  }

 private:
  std::filesystem::path m_path;
};

inline std::string bytes_of(const std::filesystem::path& file) {
  std::ifstream stream(file, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

inline void write_bytes(const std::filesystem::path& file, const std::string& bytes) {
  std::ofstream(file, std::ios::binary) << bytes;
}

/// The message of the exception of type Error that the call throws; a test failure if it throws
/// none.
template <class Error, class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    const std::string text = error.what();
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    return text;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another type of exception: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no exception";
  return {};
}

inline hid_t checked(hid_t id) {
  if (id < 0) throw std::runtime_error("the test's own HDF5 call failed");
  return id;
}

/// A file written with the C interface.
class RawFile {
 public:
  explicit RawFile(const std::filesystem::path& path)
      : m_file(checked(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT))),
        m_intermediate(checked(H5Pcreate(H5P_LINK_CREATE))) {
    checked(H5Pset_create_intermediate_group(m_intermediate, 1));
  }
  ~RawFile() {
    H5Pclose(m_intermediate);
    H5Fclose(m_file);
  }
  RawFile(const RawFile&) = delete;
  RawFile& operator=(const RawFile&) = delete;

  hid_t id() const { return m_file; }

  void group(const std::string& path) {
    H5Gclose(checked(H5Gcreate2(m_file, path.c_str(), m_intermediate, H5P_DEFAULT, H5P_DEFAULT)));
  }

  /// Nothing is written if data is null.
  void dataset(const std::string& path, hid_t stored, const std::vector<hsize_t>& extents,
               hid_t memory, const void* data, hid_t creation = H5P_DEFAULT) {
    const hid_t space = checked(extents.empty() ? H5Screate(H5S_SCALAR)
                                                : H5Screate_simple(static_cast<int>(extents.size()),
                                                                   extents.data(), nullptr));
    const hid_t set = checked(
        H5Dcreate2(m_file, path.c_str(), stored, space, m_intermediate, creation, H5P_DEFAULT));
    if (data != nullptr) checked(H5Dwrite(set, memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, data));
    H5Dclose(set);
    H5Sclose(space);
  }

  /// Bytes exactly as given.
  void raw(const std::string& path, hid_t type, const std::vector<hsize_t>& extents,
           const void* data) {
    dataset(path, type, extents, type, data);
  }

  /// Float64 of the given extents: 0.5, 1.5, 2.5, ...
  void ramp(const std::string& path, const std::vector<hsize_t>& extents,
            hid_t stored = H5T_IEEE_F64LE) {
    hsize_t size = 1;
    for (const hsize_t extent : extents) size *= extent;
    std::vector<double> values(size + 1);
    for (hsize_t i = 0; i < size; ++i) values[i] = static_cast<double>(i) + 0.5;
    dataset(path, stored, extents, H5T_NATIVE_DOUBLE, values.data());
  }

  /// An attribute of a scalar, or of an array if extents are given; of a null space if data is
  /// null.
  void attribute(const std::string& object, const std::string& name, hid_t type, const void* data,
                 const std::vector<hsize_t>& extents = {}, hid_t memory = -1) {
    const hid_t target = checked(H5Oopen(m_file, object.c_str(), H5P_DEFAULT));
    const hid_t space =
        checked(data == nullptr ? H5Screate(H5S_NULL)
                : extents.empty()
                    ? H5Screate(H5S_SCALAR)
                    : H5Screate_simple(static_cast<int>(extents.size()), extents.data(), nullptr));
    const hid_t made =
        checked(H5Acreate2(target, name.c_str(), type, space, H5P_DEFAULT, H5P_DEFAULT));
    if (data != nullptr) checked(H5Awrite(made, memory < 0 ? type : memory, data));
    H5Aclose(made);
    H5Sclose(space);
    H5Oclose(target);
  }

  void text(const std::string& object, const std::string& name, const std::string& value) {
    const hid_t type = checked(H5Tcopy(H5T_C_S1));
    H5Tset_size(type, value.size() + 1);
    attribute(object, name, type, value.c_str());
    H5Tclose(type);
  }

  void integer(const std::string& object, const std::string& name, std::int64_t value) {
    attribute(object, name, H5T_NATIVE_INT64, &value);
  }

  void real(const std::string& object, const std::string& name, double value) {
    attribute(object, name, H5T_NATIVE_DOUBLE, &value);
  }

 private:
  hid_t m_file;
  hid_t m_intermediate;
};

/// IEEE binary16 of a byte order. The caller closes it.
inline hid_t make_half_type(H5T_order_t order) {
  const hid_t type = checked(H5Tcopy(H5T_IEEE_F32LE));
  H5Tset_fields(type, 15, 10, 5, 0, 10);
  H5Tset_size(type, 2);
  H5Tset_ebias(type, 15);
  H5Tset_order(type, order);
  return type;
}

}  // namespace LinAttn::test_support
