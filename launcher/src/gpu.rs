//! The GPUs of this machine, their names, and which of them a program sees.
//!
//! They are read from the driver's folder and NVIDIA's own tool. Either can be missing: the tool in a small container, the
//! folder in many. Neither loads CUDA.

use std::ffi::OsStr;
use std::fmt;
use std::fs;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use accelerator_host::machine::nvidia_smi;
use serde::Serialize;

use crate::error::{Error, Result};
use crate::text::size;

/// One GPU, or a part of one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GpuId {
    /// Its place among all.
    Number(u32),
    /// `GPU-…`, or `MIG-…` for a part of one; CUDA takes the beginning of one as well.
    Uuid(String),
}

/// The value of `--gpu-ids`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GpuIds {
    /// Every GPU that is visible.
    All,
    /// These, at least one and each once.
    Listed(Vec<GpuId>),
}

impl FromStr for GpuId {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let is_uuid = ["GPU-", "MIG-"].iter().any(|prefix| {
            text.strip_prefix(prefix).is_some_and(|rest| {
                let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-/".contains(&byte);
                !rest.is_empty() && rest.bytes().all(is_part)
            })
        });
        if is_uuid {
            return Ok(Self::Uuid(text.to_owned()));
        }
        // Rust's numbers may begin with a plus.
        let is_number = text.bytes().all(|byte| byte.is_ascii_digit());
        let number = text.parse().ok().filter(|_| is_number);
        number.map(Self::Number).ok_or_else(|| {
            format!("{text:?} is no GPU: expected a number from 0 on, or an id such as GPU-5a2c…")
        })
    }
}

impl fmt::Display for GpuId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(formatter),
            Self::Uuid(uuid) => formatter.write_str(uuid),
        }
    }
}

impl FromStr for GpuIds {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        const EXPECTED: &str = "expected `all`, or GPUs with commas between them, such as 0,2";
        if text == "all" {
            return Ok(Self::All);
        }
        if text.trim().is_empty() {
            return Err(format!("the list is empty; {EXPECTED}"));
        }
        let mut ids: Vec<GpuId> = Vec::new();
        for part in text.split(',').map(str::trim) {
            if part.is_empty() {
                return Err(format!(
                    "nothing stands before or after a comma; {EXPECTED}"
                ));
            }
            let id = part.parse()?;
            if ids.contains(&id) {
                return Err(format!("{id} is named twice; name each GPU once"));
            }
            ids.push(id);
        }
        Ok(Self::Listed(ids))
    }
}

/// Joins the ids with commas, as in `CUDA_VISIBLE_DEVICES`.
pub(crate) fn joined(ids: &[GpuId]) -> String {
    let ids: Vec<_> = ids.iter().map(GpuId::to_string).collect();
    ids.join(",")
}

/// The variable that limits which devices CUDA shows to a program.
pub(crate) const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// The GPUs that a program sees; it numbers them by their order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Visible {
    All,
    Listed(Vec<GpuId>),
}

impl Visible {
    /// The value of the variable, as CUDA reads it: nothing if it is empty, and nothing from the first
    /// entry on that is no GPU, as in `0,1,-1`.
    pub(crate) fn of(variable: Option<&OsStr>) -> Self {
        let Some(value) = variable else {
            return Self::All;
        };
        let value = value.to_string_lossy();
        let ids = value.split(',').map(|entry| entry.trim().parse());
        Self::Listed(ids.map_while(std::result::Result::ok).collect())
    }

    /// Selects `ids`, whose numbers are places among the visible GPUs.
    ///
    /// # Errors
    /// For one that is not visible, and for one that is named twice.
    pub(crate) fn select(&self, ids: &[GpuId]) -> Result<Vec<GpuId>> {
        let Self::Listed(there) = self else {
            return Ok(ids.to_vec());
        };
        let mut chosen: Vec<GpuId> = Vec::new();
        for id in ids {
            let found = match id {
                GpuId::Number(place) => usize::try_from(*place).ok().and_then(|x| there.get(x)),
                GpuId::Uuid(uuid) => there.iter().find(|known| is_same(known, uuid)),
            };
            let Some(found) = found else {
                return Err(Error::usage(hidden(id, there)));
            };
            if chosen.contains(found) {
                return Err(Error::usage(format!(
                    "--gpu-ids comes to {found} twice within {VISIBLE}={}; name each GPU once",
                    joined(there)
                )));
            }
            chosen.push(found.clone());
        }
        Ok(chosen)
    }
}

/// A value of [`VISIBLE`] for people: if it is empty, nothing is visible.
pub(crate) fn shown(value: &OsStr) -> String {
    match value.to_string_lossy() {
        text if text.trim().is_empty() => "none: the variable is empty".to_owned(),
        text => text.into_owned(),
    }
}

/// Returns `true` if an entry of the variable and an id are the same; either may be the beginning of the other.
fn is_same(known: &GpuId, uuid: &str) -> bool {
    match known {
        GpuId::Number(_) => false,
        GpuId::Uuid(known) => known.starts_with(uuid) || uuid.starts_with(known.as_str()),
    }
}

/// Describes the problem with an id that is not visible.
fn hidden(id: &GpuId, there: &[GpuId]) -> String {
    let shown = format!("{VISIBLE}={}", joined(there));
    match (id, there.len()) {
        (_, 0) => format!(
            "--gpu-ids names {id}, and {VISIBLE} hides every GPU; unset the variable, or leave the option out"
        ),
        (GpuId::Number(_), count) => format!(
            "--gpu-ids names {id}, and {shown} shows {count}: ids are places in that list, from 0 to \
             {}; choose among them, or unset the variable",
            count - 1
        ),
        (GpuId::Uuid(_), _) => format!(
            "--gpu-ids names {id}, which is not in {shown}; name places in that list, from 0, or unset \
             the variable"
        ),
    }
}

/// A GPU of this machine. A field that is `None` is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Gpu {
    /// Its number in the order of the PCI bus, which is that of `nvidia-smi`.
    pub(crate) index: Option<u32>,
    pub(crate) name: Option<String>,
    /// Its memory.
    pub(crate) memory_bytes: Option<u64>,
    /// The version of its driver.
    pub(crate) driver: Option<String>,
    /// Its address on the PCI bus, such as `0000:18:00.0`.
    pub(crate) pci: Option<String>,
    /// `GPU-…`.
    pub(crate) uuid: Option<String>,
    /// True if `CUDA_VISIBLE_DEVICES` lets programs see it.
    pub(crate) visible: Option<bool>,
}

/// The places to ask.
#[derive(Clone, Copy, Debug)]
struct Sources<'a> {
    /// The folder of the driver.
    folder: &'a Path,
    /// `nvidia-smi`.
    program: &'a OsStr,
    /// The time that the program may take: it hangs if a device does.
    limit: Duration,
}

/// The GPUs of this host, and of each whether programs that are started here see it.
pub(crate) fn of_this_host(visible: &Visible) -> Vec<Gpu> {
    /// A tool that takes longer waits for a device that hangs.
    const NVIDIA_SMI_TIMEOUT: Duration = Duration::from_secs(2);
    let mut gpus = list(Sources {
        folder: Path::new("/proc/driver/nvidia"),
        program: "nvidia-smi".as_ref(),
        limit: NVIDIA_SMI_TIMEOUT,
    });
    for gpu in &mut gpus {
        gpu.visible = gpu.is_visible(visible);
    }
    gpus
}

/// The GPUs in the order of the PCI bus; empty if there are none.
fn list(sources: Sources<'_>) -> Vec<Gpu> {
    let mut gpus = from_tool(sources.program, sources.limit);
    let is_answered = !gpus.is_empty();
    for gpu in from_folder(sources.folder) {
        let known = gpus
            .iter_mut()
            .find(|known| known.pci.is_some() && known.pci == gpu.pci);
        match known {
            Some(known) => known.fill(gpu),
            None => gpus.push(gpu),
        }
    }
    if !is_answered {
        for (index, gpu) in (0..).zip(&mut gpus) {
            gpu.index = Some(index);
        }
    }
    gpus
}

impl Gpu {
    /// Three columns: number, name and memory, and details; whether `visible` includes it is a detail.
    pub(crate) fn described(&self, visible: &Visible) -> [String; 3] {
        let number = self.index.map(|index| format!("GPU {index}"));
        let name = self.name.as_deref().unwrap_or("NVIDIA GPU");
        let value = match self.memory_bytes {
            Some(bytes) => format!("{name}, {}", size(bytes)),
            None => name.to_owned(),
        };
        let driver = self.driver.as_ref().map(|text| format!("driver {text}"));
        let pci = self.pci.as_ref().map(|text| format!("PCI {text}"));
        let visible = match (visible, self.visible) {
            (Visible::All, _) => None,
            (_, Some(true)) => Some(format!("visible by {VISIBLE}")),
            (_, Some(false)) => Some(format!("hidden by {VISIBLE}")),
            (_, None) => Some(format!("{VISIBLE} may hide it")),
        };
        let details = [driver, pci, self.uuid.clone(), visible];
        let details: Vec<String> = details.into_iter().flatten().collect();
        let number = number.unwrap_or_else(|| "GPU".to_owned());
        [number, value, details.join(", ")]
    }

    /// Returns `true` if a program that sees `visible` sees this GPU or a part of it; `None` if that is unknown.
    fn is_visible(&self, visible: &Visible) -> Option<bool> {
        let Visible::Listed(there) = visible else {
            return Some(true);
        };
        let mut is_certain = true;
        for id in there {
            let shown = match (id, self.index, &self.uuid) {
                (GpuId::Number(number), Some(index), _) => Some(*number == index),
                (GpuId::Uuid(id), _, Some(uuid)) if id.starts_with("GPU-") => {
                    Some(uuid.starts_with(id))
                }
                // Such a part names its GPU.
                (GpuId::Uuid(id), _, Some(uuid)) if id.starts_with("MIG-GPU-") => {
                    Some(id.contains(uuid))
                }
                _ => None,
            };
            match shown {
                Some(true) => return Some(true),
                Some(false) => {}
                None => is_certain = false,
            }
        }
        is_certain.then_some(false)
    }

    /// Fills missing fields from another source about the same GPU.
    fn fill(&mut self, other: Self) {
        self.name = self.name.take().or(other.name);
        self.driver = self.driver.take().or(other.driver);
        self.uuid = self.uuid.take().or(other.uuid);
    }
}

/// The GPUs in the driver's folder, in the order of the PCI bus.
fn from_folder(folder: &Path) -> Vec<Gpu> {
    let driver = fs::read_to_string(folder.join("version"))
        .ok()
        .and_then(|text| version(&text));
    let Ok(entries) = fs::read_dir(folder.join("gpus")) else {
        return Vec::new();
    };
    let mut gpus: Vec<Gpu> = entries
        .flatten()
        .filter_map(|entry| {
            let text = fs::read_to_string(entry.path().join("information")).ok()?;
            let field = |name: &str| {
                let mut fields = text.lines().filter_map(|line| line.split_once(':'));
                let (_, value) = fields.find(|(known, _)| known.trim() == name)?;
                known(value)
            };
            Some(Gpu {
                name: field("Model"),
                driver: driver.clone(),
                pci: address(&entry.file_name().to_string_lossy()),
                uuid: field("GPU UUID"),
                ..Gpu::default()
            })
        })
        .collect();
    gpus.sort_by(|one, other| one.pci.cmp(&other.pci));
    gpus
}

/// The GPUs that the tool lists within `limit`.
///
/// Called before the launcher reaps the orphans that it adopts, of which this child would be one.
fn from_tool(program: &OsStr, limit: Duration) -> Vec<Gpu> {
    let query = "index,name,memory.total,driver_version,uuid,pci.bus_id";
    let rows = nvidia_smi(program, query, None, limit);
    rows.iter().filter_map(|row| gpu(row)).collect()
}

/// A row of the tool: `0`, `NVIDIA H100 80GB HBM3`, `81559`, `550.54.15`, `GPU-5a2c…`, `00000000:18:00.0`.
fn gpu(row: &[String]) -> Option<Gpu> {
    // A name may hold a comma.
    let [index, name @ .., memory, driver, uuid, pci] = row else {
        return None;
    };
    Some(Gpu {
        index: Some(index.parse().ok()?),
        name: known(&name.join(", ")),
        memory_bytes: memory
            .parse()
            .ok()
            .and_then(|mib: u64| mib.checked_mul(1 << 20)),
        driver: known(driver),
        pci: address(pci),
        uuid: known(uuid),
        visible: None,
    })
}

/// A value that is known: not `[N/A]`, nor the question marks of a suspended device.
fn known(value: &str) -> Option<String> {
    let value = value.trim();
    let says_nothing = value.is_empty() || value.starts_with('[') || value.contains('?');
    (!says_nothing).then(|| value.to_owned())
}

/// An address on the PCI bus as the kernel writes it; the tool writes more digits, and capitals.
fn address(text: &str) -> Option<String> {
    let (domain, rest) = text.split_once(':')?;
    let domain = u32::from_str_radix(domain, 16).ok()?;
    Some(format!("{domain:04x}:{}", rest.to_ascii_lowercase()))
}

fn version(text: &str) -> Option<String> {
    let line = text
        .lines()
        .find(|line| line.starts_with("NVRM version:"))?;
    let is_version = |word: &&str| {
        word.contains('.')
            && word
                .bytes()
                .all(|byte| byte.is_ascii_digit() || byte == b'.')
    };
    line.split_whitespace().find(is_version).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::path::PathBuf;
    use std::time::Instant;

    use super::*;

    #[test]
    fn lists_are_read() {
        assert_eq!("all".parse(), Ok(GpuIds::All));
        let uuid = "MIG-GPU-5a2c/1/0";
        let Ok(GpuIds::Listed(ids)) = format!("0, 02,{uuid}").parse() else {
            panic!("expected a list");
        };
        assert_eq!(
            ids,
            [
                GpuId::Number(0),
                GpuId::Number(2),
                GpuId::Uuid(uuid.to_owned())
            ]
        );
        assert_eq!(joined(&ids), format!("0,2,{uuid}"));
    }

    #[test]
    fn nonsense_is_refused_with_what_is_wrong() {
        for (text, part) in [
            ("", "empty"),
            (" ", "empty"),
            ("0,", "comma"),
            (",0", "comma"),
            ("0,,1", "comma"),
            ("0,two", "\"two\""),
            ("-1", "\"-1\""),
            ("+1", "\"+1\""),
            ("0;1", "\"0;1\""),
            ("0,all", "\"all\""),
            ("GPU-", "\"GPU-\""),
            ("99999999999", "\"99999999999\""),
            ("1,0,01", "1 is named twice"),
            ("GPU-5a,GPU-5a", "GPU-5a is named twice"),
        ] {
            let error = text.parse::<GpuIds>().unwrap_err();
            assert!(error.contains(part), "{text:?}: {error}");
        }
    }

    fn visible(value: &str) -> Visible {
        Visible::of(Some(value.as_ref()))
    }

    fn ids(text: &str) -> Vec<GpuId> {
        text.split(',').map(|id| id.parse().unwrap()).collect()
    }

    #[test]
    fn the_variable_is_read_as_cuda_reads_it() {
        assert_eq!(Visible::of(None), Visible::All);
        for (value, shown) in [
            ("", ""),
            ("-1", ""),
            ("NoDevFiles", ""),
            ("3, 1", "3,1"),
            ("3,-1,2", "3"),
            ("GPU-5a,MIG-7f/1", "GPU-5a,MIG-7f/1"),
        ] {
            let Visible::Listed(there) = visible(value) else {
                panic!("expected a list");
            };
            assert_eq!(joined(&there), shown, "{value:?}");
        }
    }

    #[test]
    fn numbers_are_places_and_ids_are_found() {
        for (value, asked, chosen) in [
            ("4,5,6", "0,2", "4,6"),
            ("4,5,6", "2,0", "6,4"),
            ("GPU-5a2c,MIG-7f,3", "1,GPU-5a", "MIG-7f,GPU-5a2c"),
            ("GPU-5a", "GPU-5a2c-11", "GPU-5a"),
        ] {
            let found = visible(value).select(&ids(asked)).unwrap();
            assert_eq!(joined(&found), chosen, "{asked} of {value}");
        }
        let asked = ids("7,GPU-5a");
        assert_eq!(Visible::All.select(&asked).unwrap(), asked);
    }

    #[test]
    fn hidden_and_repeated_ids_are_refused() {
        for (value, asked, parts) in [
            ("4,5", "4", &["names 4", "shows 2", "from 0 to 1"][..]),
            ("4,5", "GPU-5a", &["GPU-5a", "not in", "4,5"]),
            ("", "0", &["names 0", "hides every GPU"]),
            ("GPU-5a,1", "0,GPU-5a", &["GPU-5a twice", "GPU-5a,1"]),
        ] {
            let error = visible(value).select(&ids(asked)).unwrap_err();
            assert!(error.is_usage());
            for part in parts {
                assert!(error.to_string().contains(part), "{error}");
            }
        }
    }

    /// The limit of a tool that answers; generous, for a loaded machine.
    const LIMIT: Duration = Duration::from_secs(60);

    struct Machine(tempfile::TempDir);

    impl Machine {
        fn new() -> Self {
            Self(tempfile::tempdir().unwrap())
        }

        fn with_driver(self, gpus: &[(&str, &str)]) -> Self {
            let folder = self.0.path();
            fs::create_dir_all(folder.join("gpus")).unwrap();
            let version = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  \
                           Release Build\nGCC version:  gcc version 12.2.0\n";
            fs::write(folder.join("version"), version).unwrap();
            for (pci, uuid) in gpus {
                let folder = folder.join("gpus").join(pci);
                fs::create_dir(&folder).unwrap();
                let text = format!(
                    "Model: \t\t NVIDIA H100\nIRQ:   \t\t 93\nGPU UUID: \t {uuid}\nBus Location: \t {pci}\n"
                );
                fs::write(folder.join("information"), text).unwrap();
            }
            self
        }

        fn with_tool(self, script: &str) -> Self {
            let path = self.tool();
            fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
            self
        }

        fn tool(&self) -> PathBuf {
            self.0.path().join("nvidia-smi")
        }

        fn list(&self, limit: Duration) -> Vec<Gpu> {
            list(Sources {
                folder: self.0.path(),
                program: self.tool().as_os_str(),
                limit,
            })
        }
    }

    #[test]
    fn nothing_is_listed_where_there_is_nothing() {
        assert_eq!(Machine::new().list(LIMIT), []);
        let failing = "echo 'NVIDIA-SMI has failed because it could not, a, b, c, d, e'; exit 9";
        assert_eq!(Machine::new().with_tool(failing).list(LIMIT), []);
    }

    #[test]
    fn the_folder_is_enough() {
        let machine = Machine::new()
            .with_driver(&[("0000:5e:00.0", "GPU-????????"), ("0000:18:00.0", "GPU-5a")]);
        let gpus = machine.list(LIMIT);
        let expected = Gpu {
            index: Some(0),
            name: Some("NVIDIA H100".to_owned()),
            driver: Some("550.54.15".to_owned()),
            pci: Some("0000:18:00.0".to_owned()),
            uuid: Some("GPU-5a".to_owned()),
            ..Gpu::default()
        };
        assert_eq!(gpus[0], expected);
        assert_eq!((gpus.len(), gpus[1].index), (2, Some(1)));
        assert_eq!(gpus[1].uuid, None);
    }

    #[test]
    fn the_tool_adds_memory_and_the_folder_what_the_tool_does_not_see() {
        let machine = Machine::new()
            .with_driver(&[("0000:18:00.0", "GPU-5a"), ("0000:5e:00.0", "GPU-7f")])
            .with_tool(
                "[ \"$2\" = --format=csv,noheader,nounits ] || exit 2\n\
                 echo '0, NVIDIA H100, 80GB, 81559, 550.54.15, [N/A], 00000000:18:00.0'",
            );
        let gpus = machine.list(LIMIT);
        assert_eq!(gpus.len(), 2);
        assert_eq!(gpus[0].name.as_deref(), Some("NVIDIA H100, 80GB"));
        assert_eq!(gpus[0].memory_bytes, Some(81_559 << 20));
        assert_eq!(gpus[0].uuid.as_deref(), Some("GPU-5a"), "of the folder");
        assert_eq!((gpus[1].index, gpus[1].memory_bytes), (None, None));
        assert_eq!(gpus[1].pci.as_deref(), Some("0000:5e:00.0"));
    }

    #[test]
    fn a_tool_that_hangs_is_ended() {
        let machine = Machine::new()
            .with_driver(&[("0000:18:00.0", "GPU-5a")])
            .with_tool("echo '0, A, 1, 2, GPU-5a, 0:18:00.0'; sleep 300");
        let started = Instant::now();
        let gpus = machine.list(Duration::from_millis(300));
        assert!(started.elapsed() < LIMIT);
        assert_eq!(
            gpus[0].name.as_deref(),
            Some("NVIDIA H100"),
            "of the folder"
        );
    }

    #[test]
    fn a_gpu_is_visible_by_number_id_or_part() {
        let gpu = Gpu {
            index: Some(1),
            uuid: Some("GPU-5a2c".to_owned()),
            ..Gpu::default()
        };
        for (value, shown) in [
            ("0,1", Some(true)),
            ("0,2", Some(false)),
            ("", Some(false)),
            ("GPU-5a", Some(true)),
            ("GPU-7", Some(false)),
            ("MIG-GPU-5a2c/1/0", Some(true)),
            ("MIG-GPU-77/1/0", Some(false)),
            ("MIG-77", None),
        ] {
            assert_eq!(
                gpu.is_visible(&Visible::of(Some(value.as_ref()))),
                shown,
                "{value:?}"
            );
        }
        assert_eq!(gpu.is_visible(&Visible::All), Some(true));
    }
}
