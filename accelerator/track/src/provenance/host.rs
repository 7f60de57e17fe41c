//! The machine.

use std::fs;

use super::facts::HostFacts;

/// What is known of this machine.
pub(super) fn facts() -> HostFacts {
    let (name, kernel) = system();
    let user = ["USER", "LOGNAME", "USERNAME"];
    let mut user = user.into_iter().filter_map(|name| std::env::var(name).ok());
    HostFacts {
        name,
        user: user.find(|user| !user.is_empty()).or_else(user_id),
        os: field("/etc/os-release", "PRETTY_NAME", '=')
            .or_else(|| Some(std::env::consts::OS.to_owned())),
        kernel,
        arch: Some(std::env::consts::ARCH.to_owned()),
        cpu: field("/proc/cpuinfo", "model name", ':'),
        cores: std::thread::available_parallelism().ok().map(Into::into),
        memory: memory(),
    }
}

/// The host's name and the kernel's version.
#[cfg(unix)]
fn system() -> (Option<String>, Option<String>) {
    let system = rustix::system::uname();
    let text = |text: &std::ffi::CStr| Some(text.to_string_lossy().into_owned());
    (text(system.nodename()), text(system.release()))
}

#[cfg(not(unix))]
fn system() -> (Option<String>, Option<String>) {
    (std::env::var("COMPUTERNAME").ok(), None)
}

#[cfg(unix)]
fn user_id() -> Option<String> {
    Some(rustix::process::getuid().as_raw().to_string())
}

#[cfg(not(unix))]
fn user_id() -> Option<String> {
    None
}

fn memory() -> Option<u64> {
    let text = field("/proc/meminfo", "MemTotal", ':')?;
    let kib: u64 = text.strip_suffix(" kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The first value of a key in a file of keys and values.
fn field(path: &str, key: &str, between: char) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let mut pairs = text.lines().filter_map(|line| line.split_once(between));
    let (_, value) = pairs.find(|(found, _)| found.trim() == key)?;
    Some(value.trim().trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_has_a_name_a_kernel_cores_and_memory() {
        let host = facts();
        let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert_eq!(host.name.as_deref(), Some(name.trim()));
        assert!(
            host.kernel
                .unwrap()
                .starts_with(|c: char| c.is_ascii_digit())
        );
        assert!(host.cores.unwrap() > 0 && host.memory.unwrap() > 1 << 24);
        assert!(!host.user.unwrap().is_empty());
    }
}
