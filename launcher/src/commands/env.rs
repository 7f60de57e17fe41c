//! `accel-launch env`: this machine and its environment.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use accelerator_collective::internal::AgentLaunch;
use accelerator_collective::{Launch, LaunchSource};
use accelerator_host::process::{self, Group, Limits};
use accelerator_host::{JOB, Reader, VARIABLES, find, variable};
use clap::Args;
use serde::Serialize;

use super::launch;
use crate::error::{Error, Result, chain};
use crate::gpu::{self, Gpu, VISIBLE, Visible, shown};
use crate::settings::Setting;
use crate::settings::options::Options;
use crate::text::{columns, print};
use crate::variables::{self, Scope};
use crate::{cargo, settings};

/// Arguments of `accel-launch env`.
#[derive(Args, Clone, Debug)]
pub(crate) struct EnvArgs {
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
    /// The options of the launch whose settings are shown.
    #[command(flatten)]
    pub(crate) options: Options,
}

/// Prints the report; the exit code is 1 if the environment holds an error.
pub(crate) fn run(arguments: &EnvArgs) -> Result<ExitCode> {
    let options = &arguments.options;
    if let Some(script) = &options.script {
        return Err(Error::usage(format!(
            "`env` starts no program: leave {} out, or write --dry-run in the place of `env`",
            script.display()
        )));
    }
    let mut report = EnvReport::collect();
    report.add_launch(options);
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
struct EnvReport {
    version: &'static str,
    platform: Platform,
    cores: NonZeroUsize,
    threads: Vec<ThreadShare>,
    topology: Option<String>,
    /// The launcher that has told this process its place.
    launcher: Option<LauncherEntry>,
    /// Launchers that have left variables, and whose place is not taken.
    launchers_noticed: Vec<LauncherEntry>,
    /// The variables by which an engine tells a launcher its host.
    agent: Option<AgentEntry>,
    settings: Vec<SettingEntry>,
    /// The file of settings that a launch reads.
    config_file: Option<PathBuf>,
    /// The settings of a launch on this host.
    launch: Vec<Setting>,
    tools: Vec<Tool>,
    devices: Vec<DeviceFile>,
    gpus: Vec<Gpu>,
    /// The GPUs that are visible; each GPU also has a field for it.
    #[serde(skip)]
    visible: Visible,
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
struct ThreadShare {
    ranks: NonZeroUsize,
    threads_per_rank: NonZeroUsize,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct LauncherEntry {
    name: &'static str,
    /// A variable that shows it.
    variable: &'static str,
}

impl From<LaunchSource> for LauncherEntry {
    fn from(source: LaunchSource) -> Self {
        Self {
            name: source.launcher,
            variable: source.variable,
        }
    }
}

/// The place of a launcher among those of a job; values that the engine does not tell are absent.
#[derive(Clone, Debug, Serialize)]
struct AgentEntry {
    engine: LauncherEntry,
    engines_noticed: Vec<LauncherEntry>,
    node: Option<usize>,
    nodes: Option<String>,
    processes: Option<String>,
    head: Option<String>,
}

impl AgentEntry {
    fn of(launch: &AgentLaunch) -> Self {
        Self {
            engine: launch.source.into(),
            engines_noticed: launch
                .noticed
                .iter()
                .map(|source| (*source).into())
                .collect(),
            node: launch.node,
            nodes: launch.nodes.map(|nodes| nodes.to_string()),
            processes: launch.processes.map(|processes| processes.to_string()),
            head: launch.head.as_ref().map(ToString::to_string),
        }
    }

    fn text(&self) -> String {
        let or = |told: &Option<String>| told.clone().unwrap_or_else(|| "?".to_owned());
        format!(
            "host {} of {}, {} processes, the first at {}",
            or(&self.node.map(|node| node.to_string())),
            or(&self.nodes),
            or(&self.processes),
            or(&self.head)
        )
    }
}

#[derive(Clone, Debug, Serialize)]
struct SettingEntry {
    name: String,
    value: String,
    origin: String,
    /// The values that a variable of this project may have.
    #[serde(skip_serializing_if = "Option::is_none")]
    expected: Option<String>,
    /// The reader of the variable.
    #[serde(skip_serializing_if = "Option::is_none")]
    read_by: Option<String>,
}

impl SettingEntry {
    fn variable(name: &str, value: Option<OsString>, default: &str) -> Self {
        let (value, origin) = match value {
            Some(value) => (value.to_string_lossy().into_owned(), "environment"),
            None => (default.to_owned(), "default"),
        };
        Self {
            name: name.to_owned(),
            value,
            origin: origin.to_owned(),
            expected: None,
            read_by: None,
        }
    }
}

#[derive(Clone, Debug, Serialize)]
struct Tool {
    name: &'static str,
    program: String,
    version: Option<String>,
}

/// A device file; whether a program can use the device depends on its build too.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
struct DeviceFile {
    kind: &'static str,
    path: String,
}

impl EnvReport {
    fn collect() -> Self {
        let cores = settings::cores();
        let ours = variables::set();
        let errors_found = variables::errors(&ours, Scope::Everything);
        let mut errors = Vec::new();
        // A launcher of MPI's is not asked: it would take the end of this process for that of a rank.
        let read = |name: &str| Some(variable(name)?.to_string_lossy().into_owned());
        let mut launchers = (None, Vec::new());
        let (topology, mut settings) = match Launch::from_vars(read) {
            Ok(launch) => {
                let noticed = launch.noticed().iter().map(|source| (*source).into());
                launchers = (launch.source().map(Into::into), noticed.collect());
                let settings = launch.settings().iter().map(|setting| SettingEntry {
                    name: setting.name.to_owned(),
                    value: setting.value.clone(),
                    origin: setting.origin.to_string(),
                    expected: None,
                    read_by: None,
                });
                (Some(launch.topology.to_string()), settings.collect())
            }
            Err(error) => {
                let text = chain(&error);
                // An error of a single variable is reported below.
                if !errors_found.iter().any(|fault| text.contains(&fault.name)) {
                    errors.push(text);
                }
                (None, Vec::new())
            }
        };
        settings.extend(variables(&ours));
        let agent = AgentLaunch::from_env().unwrap_or_else(|error| {
            // A process that has a place as a rank is no agent.
            if errors.is_empty() && launchers.0.is_none() {
                errors.push(chain(&error));
            }
            None
        });
        let visible = Visible::of(std::env::var_os(VISIBLE).as_deref());
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
            launcher: launchers.0,
            launchers_noticed: launchers.1,
            agent: agent.as_ref().map(AgentEntry::of),
            settings,
            config_file: None,
            launch: Vec::new(),
            errors: errors
                .into_iter()
                .chain(errors_found.into_iter().map(|fault| fault.text))
                .collect(),
            tools: vec![tool("cargo", cargo::cargo()), tool("rustc", rustc())],
            devices: devices(Path::new("/dev")),
            gpus: gpu::of_this_host(&visible),
            visible,
        }
    }

    /// Adds the settings that a launch with these options would have.
    fn add_launch(&mut self, options: &Options) {
        self.config_file = options.file.as_ref().map(|file| file.path.clone());
        let is_asked = options.words.iter().skip(2).any(|word| word != "--json");
        match launch::settings_of(options) {
            Ok(settings) => {
                for setting in settings {
                    let is_variable = variables::is_ours(&setting.name);
                    let mut known = self.settings.iter_mut();
                    match known.find(|known| is_variable && known.name == setting.name) {
                        Some(known) => {
                            (known.value, known.origin) = (setting.value, setting.origin)
                        }
                        // The name of the job is another one for each launch.
                        None if setting.name == "job" && setting.origin != JOB.name => {}
                        None => self.launch.push(setting),
                    }
                }
            }
            // Without options it is an error of the environment, which is reported already where it is one.
            Err(error) if is_asked => {
                self.errors.push(chain(&error));
            }
            Err(_) => {}
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
        rows.extend(self.gpus.iter().map(|gpu| gpu.described(&self.visible)));
        if let Some(topology) = &self.topology {
            rows.push(row("topology", topology, ""));
        }
        if let Some(launcher) = &self.launcher {
            rows.push(row("launcher", launcher.name, launcher.variable));
        }
        for noticed in &self.launchers_noticed {
            let name = format!("{}, not used", noticed.name);
            rows.push(row("launcher", name, noticed.variable));
        }
        if let Some(agent) = &self.agent {
            rows.push(row("as an agent", agent.text(), agent.engine.variable));
        }
        rows.extend(
            self.settings
                .iter()
                .map(|entry| row(&entry.name, &entry.value, &entry.origin)),
        );
        let file = self.config_file.as_ref();
        let file = file.map_or_else(|| "none".to_owned(), |file| file.display().to_string());
        rows.push(row("file of settings", file, "accel-launch config"));
        let mut text = columns(&rows);
        if !self.launch.is_empty() {
            let mut rows = vec![row("setting of a launch", "value", "from")];
            let settings = self.launch.iter();
            rows.extend(
                settings.map(|setting| row(&setting.name, &setting.value, &setting.origin)),
            );
            text.push_str(&format!("\n{}", columns(&rows)));
        }
        for error in &self.errors {
            text.push_str(&format!("error: {error}\n"));
        }
        text
    }
}

/// The thread counts for 1, 2, 4, … ranks, up to one a core.
fn shares(cores: NonZeroUsize) -> Vec<ThreadShare> {
    let doubled = std::iter::successors(Some(NonZeroUsize::MIN), |ranks| {
        ranks.checked_mul(NonZeroUsize::MIN.saturating_add(1))
    });
    let ranks: BTreeSet<_> = doubled
        .take_while(|ranks| *ranks < cores)
        .chain([cores])
        .collect();
    ranks
        .into_iter()
        .map(|ranks| ThreadShare {
            ranks,
            threads_per_rank: settings::cores_per_rank(cores, ranks),
        })
        .collect()
}

/// Every variable that affects a launch beside the topology: its value, or the default where it
/// is not set; and those of this project that nothing knows.
fn variables(ours: &[(String, OsString)]) -> Vec<SettingEntry> {
    const OTHERS: [(&str, &str); 4] = [
        ("RAYON_NUM_THREADS", "cores over ranks"),
        ("OMP_NUM_THREADS", "cores over ranks"),
        ("NO_COLOR", "colours on a terminal"),
        ("RUST_LOG", "that of the program"),
    ];
    let mut entries: Vec<_> = OTHERS
        .into_iter()
        .chain(settings::default_settings().map(|(name, value, _)| (name, value)))
        .map(|(name, default)| SettingEntry::variable(name, variable(name), default))
        .collect();
    // It alone has a meaning where it is empty.
    let visible = std::env::var_os(VISIBLE).map(|value| shown(&value).into());
    entries.push(SettingEntry::variable(VISIBLE, visible, "all devices"));
    let of = |name: &str| ours.iter().find(|(known, _)| known == name);
    for variable in VARIABLES {
        let value = of(variable.name).map(|(_, value)| value.clone());
        if value.is_none() && variable.reader == Reader::Tests {
            continue;
        }
        entries.push(SettingEntry {
            expected: Some(variable.grammar.to_string()),
            read_by: Some(variable.reader.to_string()),
            ..SettingEntry::variable(variable.name, value, variable.default)
        });
    }
    let unknown = ours.iter().filter(|(name, _)| find(name).is_none());
    entries
        .extend(unknown.map(|(name, value)| SettingEntry::variable(name, Some(value.clone()), "")));
    entries
}

/// The time that a tool may take to tell its version: rustup may have to install it.
const LONGEST_ANSWER: Duration = Duration::from_secs(3600);

fn tool(name: &'static str, mut command: Command) -> Tool {
    let program = command.get_program().to_string_lossy().into_owned();
    let limits = Limits {
        time: LONGEST_ANSWER,
        output: 1 << 16,
        // Ctrl-C ends an installation, too.
        group: Group::Callers,
    };
    let version = match process::run(command.arg("--version"), limits) {
        Ok(output) if output.is_success() => String::from_utf8_lossy(&output.stdout)
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
    Command::new(variable("RUSTC").unwrap_or_else(|| "rustc".into()))
}

/// The device files of accelerators in `folder`.
fn devices(folder: &Path) -> Vec<DeviceFile> {
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
                found.push(DeviceFile {
                    kind,
                    path: entry.path().display().to_string(),
                });
            }
        }
    };
    add(folder, "nvidia", "NVIDIA GPU");
    add(&folder.join("dri"), "renderD", "GPU (DRM render node)");
    if folder.join("kfd").exists() {
        found.push(DeviceFile {
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
    fn every_variable_is_shown_set_or_not() {
        let set = [("ACCEL_RESTRAT", "1"), ("ACCEL_DEVICE", "tpu")];
        let set = set.map(|(name, value)| (name.to_owned(), OsString::from(value)));
        let entries = variables(&set);
        let find = |name: &str| {
            let entry = entries.iter().find(|entry| entry.name == name).unwrap();
            (entry.value.as_str(), entry.origin.as_str())
        };
        assert_eq!(find("ACCEL_RESTRAT"), ("1", "environment"));
        assert_eq!(find("ACCEL_DEVICE"), ("tpu", "environment"));
        assert_eq!(find("ACCEL_OVERLAP"), ("auto", "default"));
        assert!(!entries.iter().any(|entry| entry.name == "ACCEL_FIXTURES"));
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
