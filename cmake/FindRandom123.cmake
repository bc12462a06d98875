# SPDX-License-Identifier: BSD-3-Clause
#
# Random123::Random123, the headers of Random123, which brings no package file of its own. Looked for where
# Random123_ROOT says, in the usual places, and last in the folders of Random123_PATHS.

find_path(Random123_INCLUDE_DIR Random123/philox.h PATHS ${Random123_PATHS})
mark_as_advanced(Random123_INCLUDE_DIR)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Random123 REQUIRED_VARS Random123_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "Debian has the package librandom123-dev, and -DRandom123_ROOT names another copy.")

if(Random123_FOUND AND NOT TARGET Random123::Random123)
  add_library(Random123::Random123 INTERFACE IMPORTED GLOBAL)
  set_target_properties(Random123::Random123 PROPERTIES INTERFACE_INCLUDE_DIRECTORIES "${Random123_INCLUDE_DIR}")
endif()
