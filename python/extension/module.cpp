// The extension module that lockstep/_torch.py loads when a program asks for a
// backend.

#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/Types.hpp>

#include "backend.h"
#include "interruption.h"
#include "lockstep/base/deadline.h"

namespace {

using lockstep::internal::python::Backend;

c10::intrusive_ptr<c10d::Backend> create(
    const c10d::DistributedBackendOptions& given, const std::string& kind) {
  using std::chrono::milliseconds;
  return c10::make_intrusive<Backend>(lockstep::internal::python::Request{
      .kind = kind,
      .store = given.store,
      .rank = given.group_rank,
      .size = given.group_size,
      // A float may be more than milliseconds can count.
      .timeout = std::chrono::duration_cast<milliseconds>(
          std::min<std::chrono::duration<float>>(
              given.timeout, lockstep::internal::kBoundedTimeout)),
      .group_name = given.group_id,
      .global_ranks = std::vector<int>(given.global_ranks_in_group.begin(),
                                       given.global_ranks_in_group.end())});
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  py::module_::import("torch._C._distributed_c10d");
  lockstep::internal::python::watch_signals();
  module.def("create", &create, py::arg("options"), py::arg("kind"),
             py::call_guard<py::gil_scoped_release>());
  module.def("leave_all", &lockstep::internal::python::leave_all,
             py::arg("failed"), py::call_guard<py::gil_scoped_release>());
}
