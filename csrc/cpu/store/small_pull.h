// The functions of small_pull.cpp, for the module's table.
#pragma once

#include <Python.h>

namespace gnnsys {

extern PyMethodDef kSmallPullMethods[];

}  // namespace gnnsys
