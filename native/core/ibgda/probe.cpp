#include "probe.hpp"

#include <cerrno>
#include <filesystem>

namespace ep::ibgda {
namespace {

missing kind_of(const failure& why) {
  switch (why.sys_errno) {
    case ELIBACC: return missing::library;
    case ELIBBAD: return missing::symbol;
    case ENOSYS: return missing::kernel;
    case ENODEV: return missing::device;
    case EPERM:
    case EACCES: return missing::devx;
    case ENETDOWN: return missing::port;
    case EPROTONOSUPPORT: return missing::link;
    case ENODATA: return missing::gid;
    default: return missing::other;
  }
}

const char* remedy_of(missing what, bool devx) {
  switch (what) {
    case missing::nothing: return "";
    case missing::library:
      return devx ? "install rdma-core (Debian: libibverbs1 and ibverbs-providers)" : "install libibverbs and the provider of the device (Debian: libibverbs1 and ibverbs-providers)";
    case missing::symbol: return "update rdma-core to version 32 or newer, or the vendor's driver package";
    case missing::kernel:
      return devx ? "load ib_uverbs and mlx5_ib, or use a kernel that has them; in a container, share /dev/infiniband and /sys"
                  : "load ib_uverbs and the driver of the device, or use a kernel that has them; in a container, share /dev/infiniband and /sys";
    case missing::device:
      return devx ? "check the device filter, and that the container or machine is given a ConnectX or BlueField function"
                  : "check the device filter, and that the container or machine is given an RDMA device; the kernel makes one of an Ethernet interface: "
                    "rdma link add rxe0 type rxe netdev eth0";
    case missing::devx:
      return devx ? "give the process CAP_NET_RAW in the namespace of the device, and /dev/infiniband/uverbs*; on virtual functions the administrator must allow DevX"
                  : "make /dev/infiniband/uverbs* readable and writable for this user";
    case missing::port: return "bring the link up (cable, switch, subnet manager)";
    case missing::link: return "name a device of the wanted network with the device filter, or do not ask for a link layer";
    case missing::gid: return "give the network interface of the port an address, or name a gid index";
    case missing::gpudirect: return "load nvidia-peermem, or use the open GPU kernel modules, whose memory can be exported as DMA-BUF";
    case missing::other: return "";
  }
  return "";
}

bool uses_devx(const char* backing) { return std::string(backing) != "verbs"; }

probe_report lacking(missing what, std::string reason, bool devx) {
  probe_report report;
  report.what = what;
  report.reason = std::move(reason);
  report.remedy = remedy_of(what, devx);
  return report;
}

bool exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

std::vector<placement_finding> placements_of(const probe_wish& wish) {
  std::vector<placement_finding> found;
  if (wish.gpu) {
    placement_finding exported{placement::gpu_dmabuf, wish.gpu_dmabuf.value_or(false), ""};
    if (!wish.gpu_dmabuf.has_value()) exported.why = "nobody could say whether this GPU exports DMA-BUFs";
    else if (!*wish.gpu_dmabuf) exported.why = "this GPU, or its driver, exports no DMA-BUFs";
    found.push_back(exported);
    // The module had two names.
    const bool peermem = exists(wish.device.sysfs + "/module/nvidia_peermem") || exists(wish.device.sysfs + "/module/nv_peer_mem");
    found.push_back({placement::gpu_address, peermem, peermem ? "" : "the kernel module nvidia-peermem is not loaded"});
  }
  found.push_back({placement::host, true, ""});
  return found;
}

} // namespace

const char* missing_name(missing what) {
  switch (what) {
    case missing::nothing: return "nothing";
    case missing::library: return "library";
    case missing::symbol: return "symbol";
    case missing::kernel: return "kernel";
    case missing::device: return "device";
    case missing::devx: return "devx";
    case missing::port: return "port";
    case missing::link: return "link";
    case missing::gid: return "gid";
    case missing::gpudirect: return "gpudirect";
    case missing::other: return "other";
  }
  return "other";
}

probe_report probe_driver(dl::mlx5_driver& driver, const probe_wish& wish) {
  auto opened = device_open(driver, wish.device);
  if (!opened.ok()) {
    // A filter that cannot be read, or a gid index that is not there, is the caller's mistake.
    const missing what = opened.why().status == EP_STATUS_INVALID ? missing::other : kind_of(opened.why());
    return lacking(what, opened.why().message, uses_devx(driver.backing()));
  }
  probe_report report;
  const open_port& port = opened.value();
  report.device = port.device->name();
  report.port = port.port;
  report.link = port.facts.link;
  report.gid = port.gid;
  report.far = port.far;
  report.passed_over = port.passed_over;
  report.placements = placements_of(wish);
  if (wish.gpu && !report.placements[0].possible && !report.placements[1].possible) {
    report.what = missing::gpudirect;
    report.reason = report.device + " cannot reach memory of the GPU: " + report.placements[0].why + ", and " + report.placements[1].why;
    report.remedy = remedy_of(report.what, uses_devx(driver.backing()));
  }
  (void)port.device->close();
  return report;
}

probe_report probe_without_driver(const char* backing, const failure& why) { return lacking(kind_of(why), why.message, uses_devx(backing)); }

probe_report probe_hardware(const dl::verbs_libraries& libraries, const probe_wish& wish) {
  auto driver = dl::mlx5_verbs_driver(libraries);
  if (!driver.ok()) return probe_without_driver("hardware", driver.why());
  return probe_driver(*driver.value(), wish);
}

} // namespace ep::ibgda
