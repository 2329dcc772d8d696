#include "examples/ddp_tutorial/state_dict_file.h"

#include <exception>
#include <vector>

#include <caffe2/serialize/inline_container.h>
#include <lockstep/checkpoint/atomic_file.h>
#include <lockstep/checkpoint/pickle_writer.h>
#include <lockstep/checkpoint/tensor_bytes.h>

namespace examples {

void write_state_dict(const std::string& path,
                      const lockstep::NamedTensors& tensors) {
  lockstep::PickleValue::Dict dict;
  dict.ordered = true;
  for (const auto& [name, tensor] : tensors) {
    dict.set(name, {lockstep::file_form(tensor)});
  }
  std::vector<at::Tensor> storages;
  const std::string pickle =
      lockstep::write_pickle({dict}, [&](const at::Tensor& tensor) {
        storages.push_back(tensor);
        return std::to_string(storages.size() - 1);
      });
  lockstep::AtomicFile file(path);
  // LibTorch's writer throws from its destructor after a failed write: it is
  // told that all went well, and the failure is kept for the end.
  std::exception_ptr failure;
  {
    caffe2::serialize::PyTorchStreamWriter writer(
        [&](const void* data, size_t size) {
          try {
            if (!failure) file.write(data, size);
          } catch (...) {
            failure = std::current_exception();
          }
          return size;
        });
    writer.writeRecord("data.pkl", pickle.data(), pickle.size());
    writer.writeRecord("byteorder", "little", 6);
    for (size_t i = 0; i < storages.size(); ++i) {
      writer.writeRecord("data/" + std::to_string(i), storages[i].data_ptr(),
                         storages[i].nbytes());
    }
    writer.writeEndOfFile();
  }
  if (failure) std::rethrow_exception(failure);
  file.commit();
}

}  // namespace examples
