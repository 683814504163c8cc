// Makes the library a module that Python can import. Schemas and kernels register themselves once it is loaded.
#include <Python.h>

#define KVQ_PASTE_EXPANDED(a, b) a##b
#define KVQ_PASTE(a, b) KVQ_PASTE_EXPANDED(a, b)
#define KVQ_TEXT_EXPANDED(a) #a
#define KVQ_TEXT(a) KVQ_TEXT_EXPANDED(a)

PyMODINIT_FUNC KVQ_PASTE(PyInit_, TORCH_EXTENSION_NAME)() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, KVQ_TEXT(TORCH_EXTENSION_NAME), nullptr, 0, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
