// A sysfs of our own making: folders, files and links as the kernel lays them out, in a temporary folder that goes with the object.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

namespace ep::test {

class fake_sysfs {
 public:
  fake_sysfs() {
    std::string name = (std::filesystem::temp_directory_path() / "ep-sysfs-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) std::abort();
    root_ = name;
  }
  ~fake_sysfs() {
    std::error_code ignored;
    std::filesystem::remove_all(root_, ignored);
  }
  fake_sysfs(const fake_sysfs&) = delete;
  fake_sysfs& operator=(const fake_sysfs&) = delete;

  std::string root() const { return root_.string(); }

  // `path` is below /sys/devices: "pci0000:80/0000:80:01.0/0000:81:00.0". The last part is the function.
  void pci(const std::string& path, const std::string& vendor, const std::string& class_code, int numa_node) const {
    const std::filesystem::path device = root_ / "devices" / path;
    std::filesystem::create_directories(device);
    write(device / "vendor", vendor);
    write(device / "class", class_code);
    write(device / "numa_node", std::to_string(numa_node));
    link(device, root_ / "bus/pci/devices" / device.filename());
  }
  void gpu(const std::string& path, int numa_node) const { pci(path, "0x10de", "0x030200", numa_node); }
  void nic(const std::string& name, const std::string& path, int numa_node) const {
    pci(path, "0x15b3", "0x020700", numa_node);
    const std::filesystem::path ib = root_ / "devices" / path / "infiniband" / name;
    std::filesystem::create_directories(ib);
    link(root_ / "devices" / path, ib / "device");
    link(ib, root_ / "class/infiniband" / name);
  }
  // A soft-RoCE device: no PCI function stands behind it.
  void virtual_nic(const std::string& name) const {
    const std::filesystem::path ib = root_ / "devices/virtual/infiniband" / name;
    std::filesystem::create_directories(ib);
    link(ib, root_ / "class/infiniband" / name);
  }
  void module(const std::string& name) const { std::filesystem::create_directories(root_ / "module" / name); }
  // `cpus`: "0-3,8".
  void numa(int node, const std::string& cpus = "") const {
    const std::filesystem::path folder = root_ / "devices/system/node" / ("node" + std::to_string(node));
    std::filesystem::create_directories(folder);
    write(folder / "cpulist", cpus);
  }

 private:
  static void write(const std::filesystem::path& file, const std::string& line) { std::ofstream(file) << line << '\n'; }
  static void link(const std::filesystem::path& to, const std::filesystem::path& from) {
    std::filesystem::create_directories(from.parent_path());
    if (!std::filesystem::is_symlink(from)) std::filesystem::create_directory_symlink(to, from);
  }
  std::filesystem::path root_;
};

// Two sockets. Socket 0: one switch with a GPU and a dual-port NIC, a NIC on a root port of its own, and a second host bridge with a GPU. Socket 1: a
// cascade of switches with a GPU below the second and a NIC below the first.
inline void two_sockets(const fake_sysfs& sys) {
  sys.numa(0, "0-1,4");
  sys.numa(1, "2-3,5-7");
  const std::string first_switch = "pci0000:10/0000:10:01.0/0000:11:00.0/";
  sys.gpu(first_switch + "0000:12:00.0/0000:13:00.0", 0);
  sys.nic("mlx5_0", first_switch + "0000:12:01.0/0000:14:00.0", 0);
  sys.nic("mlx5_1", first_switch + "0000:12:01.0/0000:14:00.1", 0);
  sys.nic("mlx5_2", "pci0000:10/0000:10:02.0/0000:15:00.0", 0);
  sys.gpu("pci0000:20/0000:20:01.0/0000:21:00.0", 0);
  const std::string cascade = "pci0000:80/0000:80:01.0/0000:81:00.0/";
  sys.nic("mlx5_10", cascade + "0000:82:00.0/0000:83:00.0", 1);
  sys.gpu(cascade + "0000:82:01.0/0000:84:00.0/0000:85:00.0/0000:86:00.0", 1);
  // Neither of NVIDIA nor a display: no GPU of ours.
  sys.pci("pci0000:80/0000:80:03.0/0000:87:00.0", "0x10de", "0x068000", 1);
  sys.pci("pci0000:80/0000:80:04.0/0000:88:00.0", "0x1002", "0x030000", 1);
  sys.virtual_nic("rxe0");
}

} // namespace ep::test
