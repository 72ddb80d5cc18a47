# `cmake --install`: the library, its headers and a CMake package `moelith`.
if(SKBUILD)
  return()  # a wheel holds the extension alone (component python)
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
install(TARGETS moelith moelith_flags EXPORT moelith_targets)
install(DIRECTORY include/moelith DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT moelith_targets NAMESPACE moelith:: FILE moelith-targets.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/moelith)
set(moelith_dependencies "find_dependency(Threads)")
if(MOELITH_CUDA_ENABLED)
  string(APPEND moelith_dependencies "\nfind_dependency(CUDAToolkit)")
endif()
file(WRITE ${CMAKE_BINARY_DIR}/moelith-config.cmake
  "include(CMakeFindDependencyMacro)\n${moelith_dependencies}\ninclude(\${CMAKE_CURRENT_LIST_DIR}/moelith-targets.cmake)\n")
write_basic_package_version_file(${CMAKE_BINARY_DIR}/moelith-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/moelith-config.cmake ${CMAKE_BINARY_DIR}/moelith-config-version.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/moelith)
if(TARGET moelith_command)
  install(TARGETS moelith_command)
endif()
