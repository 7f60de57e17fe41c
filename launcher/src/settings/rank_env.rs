//! The environment of a rank.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;

use accelerator_env as env;

use crate::settings::Settings;
use crate::settings::allocator;
use crate::settings::threads::Threads;
use crate::variables;

/// The variables that the launcher sets for a rank, and those that it removes.
#[derive(Clone, Debug)]
pub(crate) struct RankEnv {
    common: Vec<(&'static str, OsString)>,
    removed: Vec<OsString>,
    ranks: usize,
}

impl RankEnv {
    /// The environment of ranks whose store is on `port` of the settings' host, and which prove a token that is
    /// the store's own where it has one.
    ///
    /// `package_dir` is the folder of the cargo package that was built; the ranks find it in
    /// `CARGO_MANIFEST_DIR`, as under `cargo run`.
    pub(crate) fn new(
        settings: &Settings,
        store: SocketAddr,
        token: Option<&Path>,
        package_dir: Option<&Path>,
    ) -> Self {
        let ranks = settings.ranks.get();
        let port = OsString::from(store.port().to_string());
        let mut common: Vec<(&'static str, OsString)> = vec![
            ("WORLD_SIZE", ranks.to_string().into()),
            ("LOCAL_WORLD_SIZE", ranks.to_string().into()),
            ("MASTER_ADDR", settings.master_addr.clone().into()),
            ("MASTER_PORT", port.clone()),
            (env::PORT.name, port),
            (env::STORE.name, "launcher".into()),
            (env::JOB.name, settings.job.clone().into()),
            (env::RESTART.name, settings.restart.to_string().into()),
            (
                env::MAX_RESTARTS.name,
                settings.max_restarts.to_string().into(),
            ),
        ];
        common.extend(token.map(|path| (env::TOKEN_FILE.name, path.into())));
        for (name, threads) in &settings.threads {
            if let Threads::Set { count, .. } = threads {
                common.push((name, count.to_string().into()));
            }
        }
        common.extend(settings.gpus.variables().iter().cloned());
        let ours = common.iter().map(|(name, _)| *name);
        let ours: Vec<_> = ours.filter(|name| variables::is_ours(name)).collect();
        common.push((env::SET_BY_LAUNCHER.name, ours.join(",").into()));
        common.extend(allocator::settings(|name| std::env::var_os(name).is_some()));
        common.extend(package_dir.map(|dir| ("CARGO_MANIFEST_DIR", dir.into())));
        Self {
            common,
            removed: misleading(package_dir),
            ranks,
        }
    }

    /// How many ranks there are.
    pub(crate) fn ranks(&self) -> usize {
        self.ranks
    }

    /// The variables of `rank`.
    pub(crate) fn of(&self, rank: usize) -> Vec<(&'static str, OsString)> {
        let mut variables = vec![
            ("RANK", rank.to_string().into()),
            ("LOCAL_RANK", rank.to_string().into()),
        ];
        variables.extend(self.common.iter().cloned());
        variables
    }

    /// Gives `command` the environment of `rank`.
    pub(crate) fn apply(&self, rank: usize, command: &mut Command) {
        for name in &self.removed {
            command.env_remove(name);
        }
        command.envs(self.of(rank));
    }
}

/// Variables that the launcher was given and that would tell its ranks something wrong.
fn misleading(package_dir: Option<&Path>) -> Vec<OsString> {
    let mut names: Vec<OsString> = variables::of_other_launchers().collect();
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
        let environment = RankEnv::new(
            &settings,
            SocketAddr::from(([127, 0, 0, 1], 4242)),
            None,
            None,
        );
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
}
