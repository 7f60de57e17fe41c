//! `accel-launch env`: what is known of this machine and its environment.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::{Command, ExitCode};

use accelerator_collective::Launch;
use clap::Args;
use serde::Serialize;

use crate::cargo;
use crate::error::{Error, Result, chain};
use crate::text::{columns, print};
use crate::threads;

/// Arguments of `accel-launch env`.
#[derive(Args, Clone, Debug)]
pub(crate) struct EnvArgs {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// Prints the report; the exit code is 1 where the environment holds an error.
///
/// # Errors
/// When standard output cannot be written.
pub(crate) fn run(arguments: &EnvArgs) -> Result<ExitCode> {
    let report = Report::collect();
    let text = if arguments.json {
        let json = serde_json::to_string_pretty(&report);
        json.map_err(|error| {
            Error::system("the report cannot be written as JSON").with_source(error)
        })? + "\n"
    } else {
        report.text()
    };
    let printed = print(&text)?;
    Ok(if report.errors.is_empty() {
        printed
    } else {
        ExitCode::FAILURE
    })
}

/// Everything `accel-launch env` shows; its fields are those of the JSON object.
#[derive(Clone, Debug, Serialize)]
struct Report {
    version: &'static str,
    platform: Platform,
    cores: NonZeroUsize,
    threads: Vec<Share>,
    topology: Option<String>,
    settings: Vec<Entry>,
    tools: Vec<Tool>,
    devices: Vec<Device>,
    errors: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
struct Platform {
    os: &'static str,
    arch: &'static str,
    kernel: String,
}

/// The threads that each of a number of ranks would get.
#[derive(Clone, Copy, Debug, Serialize)]
struct Share {
    ranks: NonZeroUsize,
    threads_per_rank: NonZeroUsize,
}

#[derive(Clone, Debug, Serialize)]
struct Entry {
    name: String,
    value: String,
    origin: String,
}

#[derive(Clone, Debug, Serialize)]
struct Tool {
    name: &'static str,
    program: String,
    version: Option<String>,
}

/// A device file; whether a program can use the device depends on its build too.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct Device {
    kind: &'static str,
    path: String,
}

impl Report {
    fn collect() -> Self {
        let cores = threads::cores();
        let mut errors = Vec::new();
        let (topology, mut settings) = match Launch::from_env() {
            Ok(launch) => {
                let settings = launch.settings().iter().map(|setting| Entry {
                    name: setting.name.to_owned(),
                    value: setting.value.clone(),
                    origin: setting.origin.to_string(),
                });
                (Some(launch.topology.to_string()), settings.collect())
            }
            Err(error) => {
                errors.push(chain(&error));
                (None, Vec::new())
            }
        };
        settings.extend(variables());
        let (ours, misspelt) = own_variables(std::env::vars_os());
        settings.extend(ours);
        errors.extend(misspelt);
        Self {
            version: env!("CARGO_PKG_VERSION"),
            platform: Platform {
                os: std::env::consts::OS,
                arch: std::env::consts::ARCH,
                kernel: rustix::system::uname()
                    .release()
                    .to_string_lossy()
                    .into_owned(),
            },
            cores,
            threads: shares(cores),
            topology,
            settings,
            tools: vec![tool("cargo", cargo::cargo()), tool("rustc", rustc())],
            devices: devices(Path::new("/dev")),
            errors,
        }
    }

    fn text(&self) -> String {
        let Platform { os, arch, kernel } = &self.platform;
        let mut rows = vec![
            row("accel-launch", self.version, ""),
            row("platform", format!("{os} {kernel} {arch}"), ""),
            row("cores", self.cores, "affinity and control group"),
        ];
        for share in &self.threads {
            let ranks = share.ranks;
            let noun = if ranks.get() == 1 { "rank" } else { "ranks" };
            rows.push(row(
                &format!("threads of {ranks} {noun}"),
                share.threads_per_rank,
                "cores over ranks",
            ));
        }
        for tool in &self.tools {
            rows.push(row(
                tool.name,
                tool.version.as_deref().unwrap_or("not found"),
                &tool.program,
            ));
        }
        match self.devices.as_slice() {
            [] => rows.push(row(
                "devices",
                "none",
                "no device files of accelerators in /dev",
            )),
            devices => rows.extend(
                devices
                    .iter()
                    .map(|device| row("device", device.kind, &device.path)),
            ),
        }
        if let Some(topology) = &self.topology {
            rows.push(row("topology", topology, ""));
        }
        rows.extend(
            self.settings
                .iter()
                .map(|entry| row(&entry.name, &entry.value, &entry.origin)),
        );
        let mut text = columns(&rows);
        for error in &self.errors {
            text.push_str(&format!("error: {error}\n"));
        }
        text
    }
}

/// The thread counts for 1, 2, 4, … ranks, up to one a core.
fn shares(cores: NonZeroUsize) -> Vec<Share> {
    let doubled = std::iter::successors(Some(NonZeroUsize::MIN), |ranks| {
        ranks.checked_mul(NonZeroUsize::MIN.saturating_add(1))
    });
    let ranks: BTreeSet<_> = doubled
        .take_while(|ranks| *ranks < cores)
        .chain([cores])
        .collect();
    ranks
        .into_iter()
        .map(|ranks| Share {
            ranks,
            threads_per_rank: threads::share(cores, ranks),
        })
        .collect()
}

/// The variables that matter to a launch beside the topology, where they are set.
fn variables() -> Vec<Entry> {
    const NAMES: [&str; 5] = [
        "RAYON_NUM_THREADS",
        "OMP_NUM_THREADS",
        "CUDA_VISIBLE_DEVICES",
        "NO_COLOR",
        "RUST_LOG",
    ];
    let found = NAMES.iter().filter_map(|name| {
        let value = std::env::var_os(name)?;
        Some(Entry {
            name: (*name).to_owned(),
            value: value.to_string_lossy().into_owned(),
            origin: "environment".to_owned(),
        })
    });
    found.collect()
}

/// The variables of this project that are set, and an error for each that nothing reads: ranks
/// refuse to run with it.
fn own_variables(
    variables: impl Iterator<Item = (OsString, OsString)>,
) -> (Vec<Entry>, Vec<String>) {
    /// What programs read beside what a launch is described by; the first is for own tests.
    const OTHERS: [&str; 5] = [
        "ACCEL_FIXTURES",
        "ACCEL_COMPRESSION",
        "ACCEL_DEVICE",
        "ACCEL_OVERLAP",
        "ACCEL_TRACE",
    ];
    let known = || Launch::VARIABLES.into_iter().chain(OTHERS);
    let mut ours: Vec<_> = variables
        .map(|(name, value)| {
            let text = |text: OsString| text.to_string_lossy().into_owned();
            (text(name), text(value))
        })
        .filter(|(name, _)| name.starts_with("ACCEL_"))
        .collect();
    ours.sort();
    let unknown = ours
        .iter()
        .filter(|(name, _)| !known().any(|known| known == name));
    let errors = unknown.map(|(name, _)| {
        let names: Vec<_> = known().filter(|&name| name != OTHERS[0]).collect();
        format!(
            "the environment variable {name} is not known; expected one of {}: correct it, or \
             unset it",
            names.join(", ")
        )
    });
    let errors = errors.collect();
    let entries = ours.into_iter().map(|(name, value)| Entry {
        name,
        value,
        origin: "environment".to_owned(),
    });
    (entries.collect(), errors)
}

fn tool(name: &'static str, mut command: Command) -> Tool {
    let program = command.get_program().to_string_lossy().into_owned();
    let version = match command.arg("--version").output() {
        Ok(output) if output.status.success() => String::from_utf8_lossy(&output.stdout)
            .lines()
            .next()
            .map(|line| line.trim().to_owned()),
        _ => None,
    };
    Tool {
        name,
        program,
        version,
    }
}

fn rustc() -> Command {
    Command::new(std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
}

/// The device files of accelerators in `folder`.
fn devices(folder: &Path) -> Vec<Device> {
    let mut found = Vec::new();
    let mut add = |folder: &Path, prefix: &str, kind| {
        let Ok(entries) = std::fs::read_dir(folder) else {
            return;
        };
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let number = name.strip_prefix(prefix);
            if number.is_some_and(|number| {
                !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
            }) {
                found.push(Device {
                    kind,
                    path: entry.path().display().to_string(),
                });
            }
        }
    };
    add(folder, "nvidia", "NVIDIA GPU");
    add(&folder.join("dri"), "renderD", "GPU (DRM render node)");
    if folder.join("kfd").exists() {
        found.push(Device {
            kind: "AMD GPU compute",
            path: folder.join("kfd").display().to_string(),
        });
    }
    found.sort();
    found
}

fn row(name: &str, value: impl ToString, origin: &str) -> [String; 3] {
    [name.to_owned(), value.to_string(), origin.to_owned()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_those_that_are_there() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"] {
            std::fs::write(folder.path().join(name), "").unwrap();
        }
        std::fs::create_dir(folder.path().join("dri")).unwrap();
        std::fs::write(folder.path().join("dri/renderD128"), "").unwrap();
        let kinds: Vec<_> = devices(folder.path())
            .into_iter()
            .map(|device| device.kind)
            .collect();
        assert_eq!(kinds, ["GPU (DRM render node)", "NVIDIA GPU", "NVIDIA GPU"]);
        assert!(devices(&folder.path().join("none")).is_empty());
    }

    #[test]
    fn misspelt_variables_are_shown_and_named() {
        let set = ["ACCEL_RESTART", "ACCEL_RESTRAT", "HOME", "ACCEL_DEVICE"];
        let variables = set.map(|name| (OsString::from(name), OsString::from("1")));
        let (entries, errors) = own_variables(variables.into_iter());
        let names: Vec<_> = entries.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["ACCEL_DEVICE", "ACCEL_RESTART", "ACCEL_RESTRAT"]);
        assert_eq!(errors.len(), 1);
        assert!(errors[0].contains("ACCEL_RESTRAT is not known"));
    }

    #[test]
    fn shares_end_with_one_rank_a_core() {
        let given: Vec<_> = shares(NonZeroUsize::new(6).unwrap())
            .iter()
            .map(|share| (share.ranks.get(), share.threads_per_rank.get()))
            .collect();
        assert_eq!(given, [(1, 6), (2, 3), (4, 1), (6, 1)]);
    }
}
