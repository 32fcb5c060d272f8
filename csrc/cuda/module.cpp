// The library registers its kernels when it is loaded, behind the schemas of gnnsys._C; the module itself is empty.
#include <Python.h>

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__cuda(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cuda", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
