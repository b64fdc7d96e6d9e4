// CUDA without a GPU: enough of a device that fake tensors of it can be made and differentiated.
// As on a GPU, autograd has a thread of its own for it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

const Device FIRST{c10::DeviceType::CUDA, 0};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device exchangeDevice(Device) const override { return FIRST; }
  Device getDevice() const override { return FIRST; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, FIRST); }
  Stream getNewStream(Device, int = 0) const override { return Stream(Stream::DEFAULT, FIRST); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, FIRST); }
  void record(void**, const Stream&, DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
};

struct CUDAHooks final : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace
