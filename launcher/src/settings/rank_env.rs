//! The environment of a rank.

use std::ffi::OsString;
use std::ops::Range;
use std::path::Path;
use std::process::Command;

use accelerator_host as env;
use accelerator_track::internal::mask_arguments;

use super::{Elastic, Settings, Threads};
use crate::{settings, variables};

/// The variables that the launcher sets for the ranks of this host, and those that it removes.
#[derive(Clone, Debug)]
pub(crate) struct RankEnv {
    common: Vec<(&'static str, OsString)>,
    removed: Vec<OsString>,
    /// The ranks of this host.
    ranks: Range<usize>,
}

impl RankEnv {
    /// The environment of ranks whose store is on `port` of the settings' store host, and which prove a token that is
    /// the store's own if it has one.
    ///
    /// `package_dir` is the folder of the cargo package that was built; the ranks find it in
    /// `CARGO_MANIFEST_DIR`, as under `cargo run`.
    pub(crate) fn new(
        settings: &Settings,
        port: u16,
        token: Option<&Path>,
        package_dir: Option<&Path>,
    ) -> Self {
        let layout = &settings.layout;
        let ranks = layout.ranks_of(settings.host);
        let port = OsString::from(port.to_string());
        let mut common: Vec<(&'static str, OsString)> = vec![
            ("WORLD_SIZE", layout.ranks().to_string().into()),
            ("LOCAL_WORLD_SIZE", ranks.len().to_string().into()),
            ("GROUP_RANK", settings.host.to_string().into()),
            ("GROUP_WORLD_SIZE", layout.hosts().to_string().into()),
            ("MASTER_ADDR", settings.master_addr.clone().into()),
            ("MASTER_PORT", port.clone()),
            (env::PORT.name, port),
            (env::STORE.name, "launcher".into()),
            (env::JOB.name, settings.job.clone().into()),
            (env::LAUNCH_ID.name, settings.launch.clone().into()),
            (env::RESTART.name, settings.restart.to_string().into()),
            (
                env::MAX_RESTARTS.name,
                settings.max_restarts.to_string().into(),
            ),
        ];
        common.extend(token.map(|path| (env::TOKEN_FILE.name, path.into())));
        let elastic = settings.elastic.map(Elastic::word);
        common.extend(elastic.map(|word| (env::ELASTIC.name, word.into())));
        let on_loss = settings
            .survivors
            .map(|_| (env::ON_LOSS.name, "continue".into()));
        common.extend(on_loss);
        common
            .extend(launch_command(&settings.command).map(|json| (env::LAUNCH_COMMAND.name, json)));
        let interface = settings.network_interface.as_ref();
        common.extend(interface.map(|name| (env::NETWORK_INTERFACE.name, name.into())));
        for (name, threads) in &settings.threads {
            if let Threads::Set { count, .. } = threads {
                common.push((name, count.to_string().into()));
            }
        }
        let of_options = settings.program_variables.iter();
        common.extend(of_options.map(|(name, value)| (*name, value.into())));
        common.extend(settings.gpus.variables().iter().cloned());
        let ours = common.iter().map(|(name, _)| *name);
        let ours: Vec<_> = ours.filter(|name| variables::is_ours(name)).collect();
        common.push((env::SET_BY_LAUNCHER.name, ours.join(",").into()));
        common.extend(settings::default_variables(|name| {
            std::env::var_os(name).is_some()
        }));
        common.extend(package_dir.map(|dir| ("CARGO_MANIFEST_DIR", dir.into())));
        Self {
            common,
            removed: misleading(package_dir),
            ranks,
        }
    }

    /// The ranks of this host.
    pub(crate) fn ranks(&self) -> Range<usize> {
        self.ranks.clone()
    }

    /// The variables of `rank`, which is one of this host.
    pub(crate) fn of(&self, rank: usize) -> Vec<(&'static str, OsString)> {
        let local_rank = rank - self.ranks.start;
        let mut variables = vec![
            ("RANK", rank.to_string().into()),
            ("LOCAL_RANK", local_rank.to_string().into()),
        ];
        variables.extend(self.common.iter().cloned());
        variables
    }

    /// The variables that tell a process which is running that it is `rank` of this group.
    pub(crate) fn place_of(&self, rank: usize) -> Vec<(String, String)> {
        let text = |value: OsString| value.to_string_lossy().into_owned();
        let variables = self.of(rank).into_iter();
        let told = variables.filter(|(name, _)| PLACE.contains(name));
        told.map(|(name, value)| (name.to_owned(), text(value)))
            .collect()
    }

    /// Gives `command` the environment of `rank`.
    pub(crate) fn apply(&self, rank: usize, command: &mut Command) {
        for name in &self.removed {
            command.env_remove(name);
        }
        command.envs(self.of(rank));
    }
}

/// The variables that change when ranks form another group.
const PLACE: [&str; 12] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    env::PORT.name,
    env::STORE.name,
    env::JOB.name,
    env::ELASTIC.name,
];

/// The value of `ACCEL_LAUNCH_COMMAND`.
fn launch_command(command: &[String]) -> Option<OsString> {
    /// A system starts no process with a variable that is much longer.
    const LONGEST: usize = 64 << 10;
    let json = serde_json::to_string(&mask_arguments(command)).ok()?;
    (!command.is_empty() && json.len() <= LONGEST).then(|| json.into())
}

/// Variables that the launcher was given and that would tell its ranks something wrong.
fn misleading(package_dir: Option<&Path>) -> Vec<OsString> {
    let mut names: Vec<OsString> = accelerator_collective::internal::place_variables().collect();
    names.extend(variables::of_outer_launcher().map(OsString::from));
    // Under `cargo run` cargo has described the launcher's own package.
    let is_own =
        std::env::var_os("CARGO_PKG_NAME").is_some_and(|name| name == env!("CARGO_PKG_NAME"));
    if is_own || package_dir.is_some() {
        names.extend(variables::of_cargo());
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Layout;
    use crate::settings::gpus::Gpus;
    use crate::settings::options::{Options, Processes};

    #[test]
    fn ranks_differ_in_their_rank_only() {
        let options = Options {
            num_processes: std::num::NonZeroUsize::new(3).map(Processes::exactly),
            gpu_ids: "0,GPU-5a,2".parse().ok(),
            ..Options::default()
        };
        let gpus = Gpus::resolve(&options, |_| None).unwrap();
        let settings = Settings::resolve(&options, gpus, |_| None);
        let environment = RankEnv::new(&settings, 4242, None, None);
        let value = |rank: usize, name: &str| {
            let variables = environment.of(rank);
            let found = variables.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| value.clone().into_string().unwrap())
        };
        assert_eq!(value(2, "RANK").as_deref(), Some("2"));
        assert_eq!(value(2, "LOCAL_RANK").as_deref(), Some("2"));
        assert_eq!(value(0, "WORLD_SIZE").as_deref(), Some("3"));
        assert_eq!(value(0, "ACCEL_PORT").as_deref(), Some("4242"));
        assert_eq!(value(0, "MASTER_ADDR").as_deref(), Some("127.0.0.1"));
        assert!(value(0, "OMP_NUM_THREADS").is_some());
        for rank in 0..3 {
            let seen = value(rank, "CUDA_VISIBLE_DEVICES");
            assert_eq!(seen.as_deref(), Some("0,GPU-5a,2"));
        }
        assert_eq!(value(0, "CARGO_MANIFEST_DIR"), None);
    }

    #[test]
    fn ranks_of_several_hosts_know_their_place_on_their_own() {
        let options = Options {
            num_processes: std::num::NonZeroUsize::new(2).map(Processes::exactly),
            ..Options::default()
        };
        let gpus = Gpus::resolve(&options, |_| None).unwrap();
        let settings = Settings::resolve(&options, gpus, |_| None);
        let layout = Layout::new(vec![3, 2, 1]);
        let settings = settings.on_host(1, layout, "10.0.0.1".to_owned());
        let environment = RankEnv::new(&settings, 4242, None, None);
        assert_eq!(environment.ranks(), 3..5);
        for (name, expected) in [
            ("RANK", "4"),
            ("WORLD_SIZE", "6"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("GROUP_RANK", "1"),
            ("GROUP_WORLD_SIZE", "3"),
            ("MASTER_ADDR", "10.0.0.1"),
        ] {
            let variables = environment.of(4);
            let found = variables.iter().find(|(known, _)| *known == name);
            assert_eq!(
                found.map(|(_, value)| value.to_str()),
                Some(Some(expected)),
                "{name}"
            );
        }
    }
}
