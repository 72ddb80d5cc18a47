# The extension module moelith._moelith, by nanobind.
#
# Under `pip install .` it is installed beside the package's files. In a plain build, <build>/python/moelith becomes a
# folder of links to python/moelith/* with the extension among them: PYTHONPATH=<build>/python imports the package as
# it stands in the tree, and several build folders of one tree do not meet.
find_package(Python 3.10 COMPONENTS Interpreter Development.Module REQUIRED)
if(NOT nanobind_DIR)
  execute_process(COMMAND ${Python_EXECUTABLE} -m nanobind --cmake_dir
    OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nanobind_DIR COMMAND_ERROR_IS_FATAL ANY)
endif()
find_package(nanobind CONFIG REQUIRED)

file(GLOB moelith_binding_sources CONFIGURE_DEPENDS python/moelith/_binding/*.cpp)
if(moelith_binding_sources)
  nanobind_add_module(_moelith NB_STATIC NOMINSIZE ${moelith_binding_sources})
  target_include_directories(_moelith PRIVATE src)
  target_link_libraries(_moelith PRIVATE moelith moelith_flags)
  set_target_properties(_moelith PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/python/moelith)
  install(TARGETS _moelith LIBRARY DESTINATION moelith COMPONENT python)
endif()

add_custom_target(moelith_python ALL
  COMMAND ${CMAKE_COMMAND} -DSOURCE=${CMAKE_CURRENT_SOURCE_DIR}/python/moelith
    -DTARGET=${CMAKE_BINARY_DIR}/python/moelith -P ${CMAKE_CURRENT_LIST_DIR}/link_package.cmake
  COMMENT "Linking the Python package")
if(TARGET _moelith)
  add_dependencies(moelith_python _moelith)
endif()
