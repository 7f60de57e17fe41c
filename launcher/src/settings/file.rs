//! The file of settings that `accel-launch config` writes, and that every launch reads.
//!
//! Its keys are the long options of a launch: `num-processes = 2`, `oversubscribe-gpus = true`, `rsync = ["a", "b"]`.
//! A setting of the file holds unless a flag or a variable says otherwise.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use accelerator_collective::internal::AgentLaunch;
use accelerator_host::fs::{folder_of, write_output};
use accelerator_host::text::nearest;
use accelerator_host::{
    ACCUMULATION_STEPS, DEVICE, NETWORK_INTERFACE, OVERSUBSCRIBE_GPUS, PRECISION,
};
use clap::{Arg, ArgMatches, Command};
use toml::{Table, Value};

use super::foreign;
use crate::error::{Error, Result};
use crate::gpu::VISIBLE;
use crate::variables;

/// An option of the command line, by its long name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GivenOption {
    pub(crate) name: String,
    pub(crate) value: Option<OsString>,
}

/// The settings of a file: long options without dashes, with their values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SettingsFile {
    pub(crate) path: PathBuf,
    /// A switch has no values.
    settings: Vec<(String, Vec<String>)>,
}

impl SettingsFile {
    /// Reads the file at `given`, or else the default one if it exists. `launch` has the options of a launch.
    ///
    /// # Errors
    /// When the file cannot be read, and for a key or a value that a launch does not have.
    pub(crate) fn read(given: Option<&Path>, launch: &Command) -> Result<Option<Self>> {
        let Some(path) = given.map(Path::to_path_buf).or_else(default_path) else {
            return Ok(None);
        };
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            // The home of another user, say.
            Err(error)
                if given.is_none()
                    && [
                        ErrorKind::NotFound,
                        ErrorKind::NotADirectory,
                        ErrorKind::PermissionDenied,
                    ]
                    .contains(&error.kind()) =>
            {
                return Ok(None);
            }
            Err(error) => {
                let text = format!(
                    "the file of settings {} cannot be read; `accel-launch config` writes one",
                    path.display()
                );
                return Err(Error::usage(text).with_source(error));
            }
        };
        Self::parse(path.clone(), &text, launch)
            .map(Some)
            .map_err(|text| Error::usage(format!("{}: {text}", path.display())))
    }

    fn parse(path: PathBuf, text: &str, launch: &Command) -> std::result::Result<Self, String> {
        let table: Table = toml::from_str(text).map_err(|error| {
            let line = error.span().map_or(0, |span| text[..span.start].lines().count().max(1));
            let is_yaml = path.extension().is_some_and(|end| end == "yaml" || end == "yml");
            let why = match is_yaml {
                true => "YAML, as accelerate writes it, is not read; write the same by `accel-launch config`",
                false => error.message(),
            };
            format!("line {line}: {why}")
        })?;
        let mut settings = Vec::new();
        for (key, value) in table {
            let option = option_named(launch, &key)
                .filter(|option| is_setting(option))
                .ok_or_else(|| unknown(&key, launch))?;
            if let Some(values) = values(option, value).map_err(|text| format!("{key}: {text}"))? {
                settings.push((long(option), values));
            }
        }
        let file = Self { path, settings };
        let words = std::iter::once(OsString::from("accel-launch")).chain(file.words());
        match launch.clone().try_get_matches_from(words) {
            Ok(_) => Ok(file),
            Err(error) => {
                let said = error.render().to_string();
                let said = said.split("\n\n").next().unwrap_or_default();
                Err(said.trim_start_matches("error: ").replace("\n", " "))
            }
        }
    }

    /// Makes a file at `path` of the options that the command line has given.
    ///
    /// # Errors
    /// When one of them says what to run.
    pub(crate) fn of(path: PathBuf, launch: &Command, matches: &ArgMatches) -> Result<Self> {
        let mut settings = Vec::new();
        for option in launch.get_arguments() {
            let id = option.get_id().as_str();
            let is_given = matches.value_source(id) == Some(clap::parser::ValueSource::CommandLine);
            if !is_given || id == CONFIG_FILE {
                continue;
            }
            if !is_setting(option) {
                return Err(Error::usage(format!(
                    "{option} says what to run, and the file of settings how: leave it out"
                )));
            }
            let raw = matches.get_raw(id).into_iter().flatten();
            let values = raw.map(|value| value.to_string_lossy().into_owned());
            let values = values.filter(|_| option.get_action().takes_values());
            settings.push((long(option), values.collect()));
        }
        Ok(Self { path, settings })
    }

    /// Adds a setting, as one option of the command line.
    pub(crate) fn add(&mut self, name: &str, value: String) {
        self.settings.push((name.to_owned(), vec![value]));
    }

    /// Returns `true` if nothing is set.
    pub(crate) fn is_empty(&self) -> bool {
        self.settings.is_empty()
    }

    /// Returns `true` if the file sets this long option, such as `--grace`.
    pub(crate) fn sets(&self, option: &str) -> bool {
        let name = option.trim_start_matches('-');
        self.settings.iter().any(|(known, _)| known == name)
    }

    /// Removes the settings that flags or variables override.
    pub(crate) fn beneath(mut self, given: &[GivenOption]) -> Self {
        let is_given = |name: &str| given.iter().any(|option| option.name == name);
        let is_set = |name: &&str| variables::given(name).is_some();
        let lookup = |name: &str| variables::given(name)?.into_string().ok();
        // An engine that says it badly is an error of the launch.
        let has_engine = !matches!(AgentLaunch::from_vars(lookup), Ok(None));
        self.settings.retain(|(name, _)| {
            let name = name.as_str();
            let variables = BY_VARIABLE.iter().find(|(option, _)| *option == name);
            let overriding = BY_FLAG
                .iter()
                .filter(|(_, options)| options.contains(&name));
            let is_place = PLACE.contains(&name) || OVER_SSH.contains(&name);
            !(is_given(name)
                || overriding.into_iter().any(|(flag, _)| is_given(flag))
                || variables.is_some_and(|(_, names)| names.iter().any(is_set))
                || (has_engine && is_place))
        });
        self
    }

    /// Returns the settings as words of the command line.
    pub(crate) fn words(&self) -> Vec<OsString> {
        let mut words = Vec::new();
        for (name, values) in &self.settings {
            if values.is_empty() {
                words.push(format!("--{name}").into());
            }
            words.extend(
                values
                    .iter()
                    .map(|value| format!("--{name}={value}").into()),
            );
        }
        words
    }

    /// Writes the file, and returns its text.
    ///
    /// # Errors
    /// When it cannot be written.
    pub(crate) fn write(&self) -> Result<String> {
        let mut text = String::from(
            "# Settings of accel-launch. Flags and variables override them; `accel-launch env` shows what holds.\n",
        );
        for (name, values) in &self.settings {
            let shown: Vec<_> = values.iter().map(|value| toml_value(value)).collect();
            let value = match shown.as_slice() {
                [] => "true".to_owned(),
                [value] => value.clone(),
                values => format!("[{}]", values.join(", ")),
            };
            text.push_str(&format!("{name} = {value}\n"));
        }
        std::fs::create_dir_all(folder_of(&self.path))
            .and_then(|()| write_output(&self.path, |file| file.write_all(text.as_bytes())))
            .map_err(|error| {
                Error::system(format!("{} cannot be written", self.path.display()))
                    .with_source(error)
            })?;
        Ok(text)
    }
}

/// Returns the place of the file that is read without `--config-file`.
pub(crate) fn default_path() -> Option<PathBuf> {
    let folder = |name: &str| accelerator_host::variable(name).map(PathBuf::from);
    let folder = folder("XDG_CONFIG_HOME")
        .filter(|folder| folder.is_absolute())
        .or_else(|| Some(folder("HOME")?.join(".config")))?;
    Some(folder.join("accel-launch/config.toml"))
}

/// Returns the option of this long name; underscores count as dashes.
pub(crate) fn option_named<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    let name = name.replace('_', "-");
    command.get_arguments().find(|option| {
        let aliases = option.get_all_aliases().unwrap_or_default();
        option
            .get_long()
            .into_iter()
            .chain(aliases)
            .any(|long| long == name)
    })
}

/// The id of `--config-file`.
const CONFIG_FILE: &str = "config_file";

/// The place of the ranks.
const PLACE: [&str; 7] = [
    "join-timeout",
    "master-addr",
    "nnodes",
    "node-rank",
    "nproc-per-node",
    "num-processes",
    "rdzv-endpoint",
];

/// The options of a launch over SSH.
const OVER_SSH: [&str; 6] = [
    "hostfile",
    "hosts",
    "no-push",
    "rsync",
    "ssh-args",
    "ssh-option",
];

/// Flags, and the settings that they override beside their own: one place is as the flag says, or as the file says.
const BY_FLAG: [(&str, &[&str]); 7] = [
    ("num-processes", &PLACE),
    ("num-processes", &OVER_SSH),
    ("nproc-per-node", &["num-processes"]),
    ("nnodes", &OVER_SSH),
    ("node-rank", &OVER_SSH),
    (
        "hosts",
        &[
            "hostfile",
            "num-processes",
            "nnodes",
            "node-rank",
            "rdzv-endpoint",
        ],
    ),
    (
        "hostfile",
        &[
            "hosts",
            "num-processes",
            "nnodes",
            "node-rank",
            "rdzv-endpoint",
        ],
    ),
];

/// Settings, and the variables that override them.
const BY_VARIABLE: [(&str, &[&str]); 7] = [
    ("device", &[DEVICE.name]),
    ("gpu-ids", &[VISIBLE]),
    ("gradient-accumulation-steps", &[ACCUMULATION_STEPS.name]),
    ("mixed-precision", &[PRECISION.name]),
    ("network-interface", &[NETWORK_INTERFACE.name]),
    ("oversubscribe-gpus", &[OVERSUBSCRIBE_GPUS.name]),
    (
        "threads-per-process",
        &["RAYON_NUM_THREADS", "OMP_NUM_THREADS"],
    ),
];

fn long(option: &Arg) -> String {
    option.get_long().unwrap_or_default().to_owned()
}

/// Returns `true` for an option that says how to run, not what.
fn is_setting(option: &Arg) -> bool {
    const OTHERS: [&str; 5] = ["client_word", CONFIG_FILE, "dry_run", "help", "version"];
    option.get_long().is_some()
        && option.get_help_heading() != Some("Cargo targets")
        && !OTHERS.contains(&option.get_id().as_str())
}

/// Returns the values of a key; `None` for a switch that is off.
fn values(option: &Arg, value: Value) -> std::result::Result<Option<Vec<String>>, String> {
    let takes_value = option.get_action().takes_values();
    Ok(Some(match value {
        Value::Boolean(false) if !takes_value => return Ok(None),
        Value::Boolean(true) if !takes_value => Vec::new(),
        _ if !takes_value => return Err("expected true or false".to_owned()),
        Value::String(text) => vec![text],
        Value::Integer(number) => vec![number.to_string()],
        Value::Float(number) => vec![number.to_string()],
        Value::Array(items) => {
            let items = items.into_iter().map(|item| values(option, item));
            let items: std::result::Result<Vec<_>, _> = items.collect();
            let items: Vec<_> = items?.into_iter().flatten().flatten().collect();
            return Ok((!items.is_empty()).then_some(items));
        }
        _ => return Err("expected a text or a number".to_owned()),
    }))
}

fn unknown(key: &str, launch: &Command) -> String {
    let dashed = key.replace('_', "-");
    let known = launch.get_arguments().filter(|option| is_setting(option));
    let known = known.filter_map(Arg::get_long);
    let instead = match (foreign::instead_of(&dashed), nearest(&dashed, known)) {
        (Some(instead), _) => instead,
        (None, Some(near)) => format!("did you mean {near}?"),
        (None, None) => "`accel-launch --help` lists them, without the dashes".to_owned(),
    };
    format!("there is no setting {key}: {instead}")
}

/// Formats a value as TOML: a whole number bare, any other as a text.
fn toml_value(value: &str) -> String {
    match value
        .parse::<i64>()
        .is_ok_and(|number| number.to_string() == value)
    {
        true => value.to_owned(),
        // JSON's escapes are TOML's too.
        false => serde_json::Value::from(value).to_string(),
    }
}
