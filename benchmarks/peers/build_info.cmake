# ik-llama-cpp-python's source package lacks this script, which its build calls (the folder
# common/cmake is missing). It says what was built; nothing that is measured depends on it.
set(BUILD_NUMBER 0)
set(BUILD_COMMIT unknown)
set(BUILD_COMPILER ${CMAKE_C_COMPILER_ID})
set(BUILD_TARGET unknown)
set(COMMON ${CMAKE_CURRENT_LIST_DIR}/..)
configure_file(${COMMON}/build-info.cpp.in ${COMMON}/build-info.cpp @ONLY)
