//! The settings of a launch, and where each comes from.

pub(crate) mod file;
pub(crate) mod foreign;
pub(crate) mod gpus;
pub(crate) mod hosts;
pub(crate) mod nodes;
pub(crate) mod options;
pub(crate) mod rank_env;
pub(crate) mod target;

use std::ffi::OsString;
use std::fmt::Display;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::PathBuf;
use std::time::Duration;

use accelerator_host::PYTHON_UNBUFFERED;
use accelerator_host::allocator::ALLOCATOR_VARIABLES;
use accelerator_host::machine::{UsableCores, unix_time};
use serde::{Deserialize, Serialize};

use crate::output::{OnOutputError, Prefix};
use crate::variables;
use file::SettingsFile;
use gpus::Gpus;
use options::{Options, Processes};

/// Time between SIGTERM and SIGKILL by default.
const DEFAULT_GRACE: Duration = Duration::from_secs(5);

/// Time before the first restart by default.
const DEFAULT_RESTART_DELAY: Duration = Duration::from_secs(1);

/// Time before a job that has shrunk tries to grow again by default.
const DEFAULT_REGROW_AFTER: Duration = Duration::from_secs(60);

/// The shortest time before a process replaces a lost one, after the second loss.
const LEAST_REGROW: Duration = Duration::from_secs(1);

/// The longest such time, unless a longer one was asked for.
const MOST_REGROW: Duration = Duration::from_secs(600);

/// Restarts of a job that may shrink, by default.
const DEFAULT_RESTARTS: u64 = 3;

/// The resolved settings of a launch on this machine.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    /// The number of ranks started on this host.
    pub(crate) ranks: NonZeroUsize,
    /// The ranks of all hosts.
    pub(crate) layout: Layout,
    /// The index of this host.
    pub(crate) host: usize,
    /// The fewest ranks with which a restart may continue.
    pub(crate) least_ranks: NonZeroUsize,
    /// The most ranks that the job may grow back to on this host.
    pub(crate) most_ranks: NonZeroUsize,
    /// The time after which the job first tries to grow again.
    pub(crate) regrow_after: Duration,
    /// The smallest number of ranks that may continue after a loss; `None` if the job does not continue.
    pub(crate) survivors: Option<NonZeroUsize>,
    /// The state of an elastic job, for the ranks that are started.
    pub(crate) elastic: Option<Elastic>,
    /// The number of groups of ranks that were begun earlier in this attempt.
    pub(crate) regroups: u64,
    /// The number of times that ranks of this attempt were lost and the others have continued.
    pub(crate) losses: u32,
    /// The number of restarts so far.
    pub(crate) restart: u64,
    pub(crate) max_restarts: u64,
    /// The wait before the first restart.
    pub(crate) restart_delay: Duration,
    /// The host of the store, as the ranks of this host reach it.
    pub(crate) master_addr: String,
    /// The address at which the store listens, if this launcher hosts it.
    pub(crate) listen_addr: String,
    /// The port of the store; 0 takes a free one.
    pub(crate) master_port: u16,
    /// The network interface at which ranks listen, if the command line names one.
    pub(crate) network_interface: Option<String>,
    /// The name of the job, which keeps a stray rank of another one out.
    pub(crate) job: String,
    /// The command line of the launcher, which ranks record.
    pub(crate) command: Vec<String>,
    /// The identity of the launch, the same for all its restarts.
    pub(crate) launch: String,
    /// The variables of thread pools.
    pub(crate) threads: Vec<(&'static str, Threads)>,
    /// The variables of options that ranks read.
    pub(crate) program_variables: Vec<(&'static str, String)>,
    /// The GPUs that ranks see.
    pub(crate) gpus: Gpus,
    /// Time between SIGTERM and SIGKILL.
    pub(crate) grace: Duration,
    /// The mark of each line of output.
    pub(crate) prefix: Prefix,
    /// The folder of log files: at first the requested one, and once the job has begun, the folder of this run inside
    /// it.
    pub(crate) log_dir: Option<PathBuf>,
    /// The fate of the job if its output cannot be written.
    pub(crate) on_output_error: OnOutputError,
    /// All of it as text.
    pub(crate) table: Vec<Setting>,
}

/// The state that a rank finds when it is started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Elastic {
    /// All ranks are started with it.
    Running,
    /// Other ranks already run, and will take it in.
    Joining,
}

impl Elastic {
    /// The value of `ACCEL_ELASTIC`.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Joining => "joining",
        }
    }
}

/// One setting as text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Setting {
    pub(crate) name: String,
    pub(crate) value: String,
    pub(crate) origin: String,
}

impl Settings {
    /// Completes `options` with the variables that `lookup` finds, and with defaults; `gpus` are resolved from the same
    /// options and variables.
    pub(crate) fn resolve(
        options: &Options,
        gpus: Gpus,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Self {
        let mut table = Table {
            rows: Vec::new(),
            file: options.file.as_ref(),
        };
        let processes = options.processes();
        let ranks = processes.most;
        let origin_of_ranks = match options.nproc_per_node {
            Some(_) => "--nproc-per-node",
            None => origin(&options.num_processes, "--num-processes"),
        };
        table.add("processes", processes, origin_of_ranks);
        let is_alone = options.hosts() == 1;
        if !is_alone {
            let hosts = options.nnodes.unwrap_or(processes);
            table.add("hosts", hosts, "--nnodes");
            let host = options.node_rank.unwrap_or(0);
            table.add("this host", host, "--node-rank");
        }
        if let Some(endpoint) = &options.rdzv_endpoint {
            table.add("host 0 listens at", endpoint, "--rdzv-endpoint");
        }

        let master_addr = options
            .master_addr
            .clone()
            .unwrap_or_else(|| "127.0.0.1".to_owned());
        let shown = match (is_alone, &options.master_addr) {
            (false, None) => "where the others reach host 0",
            _ => master_addr.as_str(),
        };
        let given = origin(&options.master_addr, "--master-addr");
        table.add("store host", shown, given);

        let master_port = options.master_port.unwrap_or(0);
        let port: &dyn Display = if master_port == 0 {
            &"a free one"
        } else {
            &master_port
        };
        table.add(
            "store port",
            port,
            origin(&options.master_port, "--master-port"),
        );

        if let Some(name) = &options.network_interface {
            table.add("network interface", name, "--network-interface");
        }

        let job = match lookup(accelerator_host::JOB.name).filter(|job| !job.is_empty()) {
            Some(job) => {
                table.add("job", &job, accelerator_host::JOB.name);
                job
            }
            None => {
                let job = new_job();
                table.add("job", &job, "new for every launch");
                job
            }
        };

        let cores = cores();
        let threads = POOL_VARIABLES.map(|name| {
            let threads = Threads::choose(options.threads_per_process, lookup(name), ranks, cores);
            match &threads {
                Threads::Set { count, origin } => table.add(name, count, origin),
                Threads::Inherited(value) => table.add(name, value, "environment"),
                Threads::Unset => table.add(name, "unset", "one process: left to the program"),
            }
            (name, threads)
        });

        for (name, value, why) in default_settings() {
            match lookup(name) {
                Some(own) => table.add(name, own, "environment"),
                None => table.add(name, value, why),
            }
        }

        for [name, value, origin] in gpus.rows() {
            table.add(name, value, origin);
        }
        let program_variables = options.program_variables();
        for (name, option, value) in &program_variables {
            table.add(name, value, option);
        }

        let grace = options.grace.unwrap_or(DEFAULT_GRACE);
        table.add(
            "grace",
            format_args!("{} s", grace.as_secs_f64()),
            origin(&options.grace, "--grace"),
        );

        let by_default = if options.is_elastic() {
            DEFAULT_RESTARTS
        } else {
            0
        };
        let max_restarts = options.max_restarts.unwrap_or(by_default);
        table.add(
            "restarts",
            max_restarts,
            origin(&options.max_restarts, "--max-restarts"),
        );
        if let Some(least) = options.survivors() {
            let text = format_args!("continue with at least {least}");
            table.add("on loss", text, "--on-loss");
        }
        let restart_delay = options.restart_delay.unwrap_or(DEFAULT_RESTART_DELAY);
        table.add(
            "restart delay",
            format_args!("{} s", restart_delay.as_secs_f64()),
            origin(&options.restart_delay, "--restart-delay"),
        );

        let (prefix, why) = match (options.no_prefix, ranks.get()) {
            (_, 1) if is_alone => (Prefix::Raw, "one process"),
            (true, _) => (Prefix::Lines, "--no-prefix"),
            (false, _) => (Prefix::Rank, "default"),
        };
        table.add(
            "line prefix",
            if prefix == Prefix::Rank {
                "[rank]"
            } else {
                "none"
            },
            why,
        );

        match &options.log_dir {
            Some(dir) => table.add("log folder", dir.display(), "--log-dir"),
            None => table.add("log folder", "none", "default"),
        }
        Self {
            ranks,
            layout: Layout::of_one_host(ranks),
            host: 0,
            least_ranks: processes.least,
            most_ranks: ranks,
            regrow_after: options.regrow_after.unwrap_or(match options.survivors() {
                Some(_) => Duration::ZERO,
                None => DEFAULT_REGROW_AFTER,
            }),
            survivors: options.survivors(),
            elastic: options.is_elastic().then_some(Elastic::Running),
            regroups: 0,
            losses: 0,
            restart: 0,
            max_restarts,
            restart_delay,
            listen_addr: master_addr.clone(),
            master_addr,
            master_port,
            network_interface: options.network_interface.clone(),
            job,
            command: Vec::new(),
            launch: new_job(),
            threads: threads.to_vec(),
            program_variables: program_variables
                .into_iter()
                .map(|(name, _, value)| (name, value))
                .collect(),
            gpus,
            grace,
            prefix,
            log_dir: options.log_dir.clone(),
            on_output_error: options.on_output_error,
            table: table.rows,
        }
    }

    /// Returns the time after which the job first tries to grow again. After the second loss it is longer each time: a process
    /// that replaces a lost one may be lost again and again.
    pub(crate) fn regrow_wait(&self) -> Duration {
        match self.losses {
            0 | 1 => self.regrow_after,
            losses => {
                let least = self.regrow_after.max(LEAST_REGROW);
                let doublings = (losses - 2).min(16);
                (least * (1 << doublings)).min(self.regrow_after.max(MOST_REGROW))
            }
        }
    }

    /// The settings on one of several hosts, whose ranks reach the store at `master_addr`.
    pub(crate) fn on_host(self, host: usize, layout: Layout, master_addr: String) -> Self {
        Self {
            host,
            layout,
            master_addr,
            ..self
        }
    }

    /// The settings of a restart with this number of ranks on this host; `options` and `lookup` must be the ones that
    /// these settings were resolved from.
    pub(crate) fn restarted(
        &self,
        restart: u64,
        ranks: NonZeroUsize,
        options: &Options,
        lookup: impl Fn(&str) -> Option<String>,
    ) -> Self {
        let options = Options {
            num_processes: Some(Processes::exactly(ranks)),
            ..options.clone()
        };
        Self {
            restart,
            least_ranks: self.least_ranks,
            most_ranks: self.most_ranks,
            elastic: self.elastic,
            max_restarts: self.max_restarts,
            prefix: self.prefix,
            log_dir: self.log_dir.clone(),
            command: self.command.clone(),
            launch: self.launch.clone(),
            // A process of the previous attempt cannot join this one.
            job: format!("{}-restart-{restart}", self.job),
            ..Self::resolve(&options, self.gpus.clone(), lookup)
        }
    }

    /// The settings of the group that follows this one and in which some ranks already run. Before it, `given_up` other
    /// groups were begun and given up.
    pub(crate) fn regrouped(&self, layout: Layout, given_up: u64) -> Self {
        let regroups = self.regroups + given_up + 1;
        let job = self.job.strip_suffix(&group_suffix(self.regroups));
        Self {
            ranks: NonZeroUsize::new(layout.ranks_of(self.host).len()).unwrap_or(self.ranks),
            layout,
            regroups,
            // The port of the previous group is in use until its ranks have left.
            master_port: 0,
            // A rank of another group cannot join this one.
            job: job.unwrap_or(&self.job).to_owned() + &group_suffix(regroups),
            ..self.clone()
        }
    }
}

/// Returns the suffix of a job's name after its ranks have formed a new group this many times.
fn group_suffix(regroups: u64) -> String {
    match regroups {
        0 => String::new(),
        _ => format!("-group-{regroups}"),
    }
}

/// A name that no other launch on this machine has: this process, and when it began.
fn new_job() -> String {
    format!("{}-{:x}", std::process::id(), unix_time().as_micros())
}

struct Table<'a> {
    rows: Vec<Setting>,
    file: Option<&'a SettingsFile>,
}

impl Table<'_> {
    /// Adds a row. An option that the file has given comes from there.
    fn add(&mut self, name: &str, value: impl Display, origin: impl Display) {
        let origin = origin.to_string();
        let file = self.file.filter(|file| file.sets(&origin));
        self.rows.push(Setting {
            name: name.to_owned(),
            value: value.to_string(),
            origin: file.map_or(origin, |file| file.path.display().to_string()),
        });
    }
}

/// Returns `option` if it was given, and `default` otherwise.
fn origin<T>(given: &Option<T>, option: &'static str) -> &'static str {
    if given.is_some() { option } else { "default" }
}

/// A variable of the launcher's environment, as [`Settings::resolve`] looks it up.
pub(crate) fn variable(name: &str) -> Option<String> {
    variables::given(name)?.into_string().ok()
}

/// The number of ranks on each host. Ranks are numbered host by host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    hosts: Vec<usize>,
}

impl Layout {
    /// All ranks on one host.
    pub(crate) fn of_one_host(ranks: NonZeroUsize) -> Self {
        Self::new(vec![ranks.get()])
    }

    /// Creates the layout with these numbers of ranks, in the order of the hosts.
    pub(crate) fn new(hosts: Vec<usize>) -> Self {
        Self { hosts }
    }

    pub(crate) fn hosts(&self) -> usize {
        self.hosts.len()
    }

    /// Returns the number of ranks on all hosts.
    pub(crate) fn ranks(&self) -> usize {
        self.hosts.iter().sum()
    }

    /// The ranks of a host; none if there is no such host.
    pub(crate) fn ranks_of(&self, host: usize) -> Range<usize> {
        let before = self.hosts.iter().take(host).sum();
        before..before + self.hosts.get(host).copied().unwrap_or(0)
    }

    /// The host of a rank; the number of hosts if there is no such rank.
    pub(crate) fn host_of(&self, rank: usize) -> usize {
        let mut end = 0;
        let before = self.hosts.iter().take_while(|&&ranks| {
            end += ranks;
            end <= rank
        });
        before.count()
    }
}

/// The variables that thread pools read.
const POOL_VARIABLES: [&str; 2] = ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"];

/// The fate of one of [`POOL_VARIABLES`] in the environment of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Threads {
    /// The launcher sets it.
    Set {
        /// Threads of a rank.
        count: NonZeroUsize,
        /// The reason for this count.
        origin: String,
    },
    /// The user has set it, and it is left alone.
    Inherited(String),
    /// It is left unset, for the program to choose.
    Unset,
}

impl Threads {
    /// Decides for a variable whose present value is `inherited`, given the option
    /// `--threads-per-process`, the ranks on this machine and its cores.
    ///
    /// Ranks that each start a thread per core hinder one another, so the cores are divided
    /// between them. A single rank has all cores.
    pub(crate) fn choose(
        option: Option<NonZeroUsize>,
        inherited: Option<String>,
        ranks: NonZeroUsize,
        cores: NonZeroUsize,
    ) -> Self {
        match (option, inherited.filter(|value| !value.is_empty())) {
            (Some(count), _) => Self::Set {
                count,
                origin: "--threads-per-process".into(),
            },
            (None, Some(value)) => Self::Inherited(value),
            (None, None) if ranks.get() == 1 => Self::Unset,
            (None, None) => Self::Set {
                count: cores_per_rank(cores, ranks),
                origin: format!("{cores} cores over {ranks} local ranks"),
            },
        }
    }
}

/// The cores that each of `ranks` processes can have to itself, at least one.
pub(crate) fn cores_per_rank(cores: NonZeroUsize, ranks: NonZeroUsize) -> NonZeroUsize {
    NonZeroUsize::new(cores.get() / ranks.get()).unwrap_or(NonZeroUsize::MIN)
}

/// The cores that this process may use, by its affinity and its control group.
pub(crate) fn cores() -> NonZeroUsize {
    UsableCores::of_this_process().count()
}

/// Returns the default variables with their values, and the reason for each value.
///
/// Most are settings of glibc's allocator, which other allocators ignore.
pub(crate) fn default_settings() -> impl Iterator<Item = (&'static str, &'static str, &'static str)>
{
    let allocator = ALLOCATOR_VARIABLES.map(|(name, value)| (name, value, KEPT));
    let (name, value) = PYTHON_UNBUFFERED;
    let python = (
        name,
        value,
        "default: output appears as soon as it is printed",
    );
    allocator.into_iter().chain([python])
}

const KEPT: &str = "default: ranks reuse freed memory";

/// Returns the settings for each rank, except those that the user has set (`inherited` returns true). A single process
/// gets them too: it gains as well, and its memory use stays comparable with that of two processes.
pub(crate) fn default_variables(inherited: impl Fn(&str) -> bool) -> Vec<(&'static str, OsString)> {
    let chosen = default_settings().filter(|(name, ..)| !inherited(name));
    chosen
        .map(|(name, value, _)| (name, value.into()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(options: &Options) -> Gpus {
        Gpus::resolve(options, |_| None).unwrap()
    }

    #[test]
    fn every_setting_has_an_origin() {
        let options = Options {
            num_processes: NonZeroUsize::new(2).map(Processes::exactly),
            master_port: Some(7),
            ..Options::default()
        };
        let settings = Settings::resolve(&options, gpus(&options), |name| {
            ["OMP_NUM_THREADS", "MALLOC_TOP_PAD_"]
                .contains(&name)
                .then(|| "3".to_owned())
        });
        for (name, value, origin) in [
            ("processes", "2", "--num-processes"),
            ("store port", "7", "--master-port"),
            ("store host", "127.0.0.1", "default"),
            ("OMP_NUM_THREADS", "3", "environment"),
            ("MALLOC_TOP_PAD_", "3", "environment"),
            ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1", KEPT),
            ("line prefix", "[rank]", "default"),
            ("grace", "5 s", "default"),
            ("restarts", "0", "default"),
            ("GPUs", "all", "default"),
            ("GPU sharing", "refused", "default"),
        ] {
            let setting = settings.table.iter().find(|setting| setting.name == name);
            let setting = setting.unwrap();
            assert_eq!(
                (&*setting.value, &*setting.origin),
                (value, origin),
                "{name}"
            );
        }
        let pool = settings
            .table
            .iter()
            .find(|setting| setting.name == "RAYON_NUM_THREADS");
        assert!(pool.unwrap().origin.ends_with("over 2 local ranks"));
    }

    #[test]
    fn a_restart_keeps_all_but_the_name_the_number_and_what_follows_from_it() {
        let options = Options {
            num_processes: Some(Processes {
                least: NonZeroUsize::MIN,
                most: NonZeroUsize::new(2).unwrap(),
            }),
            ..Options::default()
        };
        let first = Settings::resolve(&options, gpus(&options), |_| None);
        assert_eq!(
            (first.ranks.get(), first.max_restarts),
            (2, DEFAULT_RESTARTS)
        );
        let again = first.restarted(1, NonZeroUsize::MIN, &options, |_| None);
        assert_eq!((again.ranks.get(), again.restart), (1, 1));
        assert_eq!(again.max_restarts, DEFAULT_RESTARTS);
        assert_eq!(again.job, format!("{}-restart-1", first.job));
        assert_eq!(again.prefix, first.prefix);
        assert!(matches!(again.threads[0].1, Threads::Unset));
    }

    #[test]
    fn ranks_are_numbered_host_by_host() {
        let layout = Layout::new(vec![2, 1, 3]);
        assert_eq!((layout.hosts(), layout.ranks()), (3, 6));
        let ranks = [0, 1, 2, 3].map(|host| layout.ranks_of(host));
        assert_eq!(ranks, [0..2, 2..3, 3..6, 6..6]);
        let hosts = [0, 1, 2, 3, 4, 5, 6].map(|rank| layout.host_of(rank));
        assert_eq!(hosts, [0, 0, 1, 2, 2, 2, 3]);
    }

    fn number(value: usize) -> NonZeroUsize {
        NonZeroUsize::new(value).unwrap()
    }

    #[test]
    fn cores_are_divided_between_ranks_if_the_user_does_not_say_otherwise() {
        for (option, inherited, ranks, cores, expected) in [
            (None, None, 2, 16, Some(8)),
            (None, None, 3, 16, Some(5)),
            (None, Some(""), 8, 2, Some(1)),
            (None, None, 1, 16, None),
            (None, Some("3"), 2, 16, None),
            (Some(7), Some("3"), 2, 16, Some(7)),
            (Some(7), None, 1, 16, Some(7)),
        ] {
            let inherited = inherited.map(str::to_owned);
            let chosen =
                Threads::choose(option.map(number), inherited, number(ranks), number(cores));
            let count = match chosen {
                Threads::Set { count, .. } => Some(count.get()),
                Threads::Inherited(_) | Threads::Unset => None,
            };
            assert_eq!(count, expected, "{option:?}, {ranks} of {cores}");
        }
    }

    #[test]
    fn the_users_own_settings_are_left_alone() {
        let names = |inherited: &str| -> Vec<_> {
            default_variables(|name| name == inherited)
                .into_iter()
                .map(|(name, _)| name)
                .collect()
        };
        assert_eq!(names("").len(), 5);
        let others = names("MALLOC_TOP_PAD_");
        assert_eq!(
            others,
            [
                "MALLOC_MMAP_THRESHOLD_",
                "MALLOC_TRIM_THRESHOLD_",
                "GLIBC_TUNABLES",
                "PYTHONUNBUFFERED"
            ]
        );
    }
}
