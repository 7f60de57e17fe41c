//! The fault matrix: transport × operation × fault.
//!
//! A job of three ranks, or of two hosts with two ranks each, calls one operation again and again. In one call rank 1
//! suffers a fault, and each survivor must end with a typed error that names it before the deadline. A cell that is
//! impossible is marked `n/a` with its reason. In network namespaces, it is a host that suffers: see `hosts/`.

mod hosts;
mod job;
mod rank;
mod report;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hosts::HostFault;
pub use rank::{rank, threads};

/// The way ranks are started and connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Processes, started by hand with variables such as `RANK`.
    Plain(Transport),
    /// Processes, started by `accel-launch`.
    Launched(Transport),
    /// Threads of one process.
    Threads,
    /// Processes on hosts that are network namespaces, each with its own `accel-launch`.
    Hosts,
}

/// The transport between the processes of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Shm,
    Tcp,
    /// Shared memory within each of two hosts, TCP between them. The second host exists only in its ranks' variables,
    /// which count local ranks anew.
    Hierarchical,
}

/// A fault of rank 1, or of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Kill,
    Segv,
    Exit,
    Panic,
    Return,
    Stop,
    Slow,
    DropConnection,
    CorruptFrame,
    OfHost(HostFault),
}

/// The places of a fault: an operation of the group, or a step before there is a group.
///
/// If the name ends with `_within`, the fault strikes after the first data of a collective with several steps:
/// `op=5 within` in a fault plan. `leave` is a broadcast by rank 1, after which all ranks leave.
pub(crate) const OPERATIONS: [&str; 26] = [
    "rendezvous",
    "connect",
    "all_reduce",
    "all_reduce_large",
    "all_reduce_large_within",
    "all_reduce_buffer",
    "all_reduce_buffer_within",
    "start_all_reduce",
    "start_several_within",
    "broadcast",
    "broadcast_from_culprit",
    "all_gather",
    "all_gather_varied",
    "all_gather_parts",
    "all_gather_parts_within",
    "reduce_scatter",
    "reduce_scatter_buffer",
    "reduce_scatter_buffer_within",
    "start_reduce_scatter",
    "start_all_gather",
    "gather_object",
    "scatter_object",
    "broadcast_object",
    "barrier",
    "idle",
    "leave",
];

/// The faults of a rank.
pub(crate) const RANK_FAULTS: [Fault; 9] = [
    Fault::Kill,
    Fault::Segv,
    Fault::Exit,
    Fault::Panic,
    Fault::Return,
    Fault::Stop,
    Fault::Slow,
    Fault::DropConnection,
    Fault::CorruptFrame,
];

pub(crate) const WAYS: [Way; 7] = [
    Way::Plain(Transport::Shm),
    Way::Launched(Transport::Shm),
    Way::Plain(Transport::Tcp),
    Way::Launched(Transport::Tcp),
    Way::Plain(Transport::Hierarchical),
    Way::Threads,
    Way::Hosts,
];

/// The rank that suffers; with several hosts, the second of the first host.
pub(crate) const CULPRIT: usize = 1;

/// The sequence number of the operation in which the fault strikes.
pub(crate) const OPERATION: u64 = 5;

/// The number of operations that one call of `start_several_within` starts.
pub(crate) const STARTED: u64 = 3;

pub(crate) const LIVENESS: Duration = Duration::from_secs(1);
pub(crate) const PROGRESS: Duration = Duration::from_secs(2);
pub(crate) const CONNECT: Duration = Duration::from_secs(4);

/// The allowance on top of a cell's deadline, since the machine may be busy.
pub(crate) const ALLOWANCE: Duration = Duration::from_millis(1500);

/// A cell and its verdict.
#[derive(Debug)]
pub(crate) struct Cell {
    pub(crate) way: Way,
    pub(crate) operation: &'static str,
    pub(crate) fault: Fault,
    pub(crate) verdict: Verdict,
}

#[derive(Debug)]
pub(crate) enum Verdict {
    /// All survivors named the culprit, the slowest after `seconds`.
    Named {
        seconds: f64,
    },
    /// The job succeeded, `seconds` after the fault.
    Survived {
        seconds: f64,
    },
    NotApplicable(&'static str),
    Failed(String),
}

/// Runs the cells whose name (such as `plain/all_reduce/kill`) contains one of the filters, or all without filters, and
/// writes the report.
pub fn run(report: Option<&Path>, filter: &[&str]) -> ExitCode {
    let wanted = |(way, operation, fault): &(Way, &str, Fault)| {
        let name = format!("{}/{operation}/{}", way.name(), fault.name());
        filter.is_empty() || filter.iter().any(|part| name.contains(part))
    };
    run_cells(report, &all().filter(wanted).collect::<Vec<_>>())
}

/// Runs every fault of a rank in every place once, over the ways in turn.
pub fn sample() -> ExitCode {
    let places = OPERATIONS[..OPERATIONS.len() - 1].iter().enumerate();
    let ways = WAYS.into_iter().filter(|way| *way != Way::Hosts);
    let cells = places.flat_map(|(row, &operation)| {
        let ways = ways.clone();
        let faults = RANK_FAULTS.into_iter().enumerate();
        faults.filter_map(move |(column, fault)| {
            let mut ways = ways.clone().cycle().skip(row + column).take(WAYS.len());
            let way = ways.find(|way| impossible(*way, operation, fault).is_none())?;
            Some((way, operation, fault))
        })
    });
    run_cells(None, &cells.collect::<Vec<_>>())
}

/// Runs one fault of a host in every place, in turn, and all of them in the place where ranks leave.
pub fn sample_of_hosts() -> ExitCode {
    let faults = hosts::FAULTS.into_iter().cycle();
    let places = OPERATIONS[..OPERATIONS.len() - 1].iter().copied();
    let places = places.zip(faults);
    let last = hosts::FAULTS.map(|fault| (OPERATIONS[OPERATIONS.len() - 1], fault));
    let cells = places
        .chain(last)
        .map(|(operation, fault)| (Way::Hosts, operation, Fault::OfHost(fault)));
    run_cells(None, &cells.collect::<Vec<_>>())
}

fn all() -> impl Iterator<Item = (Way, &'static str, Fault)> {
    WAYS.into_iter().flat_map(|way| {
        way.operations().iter().flat_map(move |&operation| {
            let faults = way.faults().into_iter();
            faults.map(move |fault| (way, operation, fault))
        })
    })
}

fn run_cells(report: Option<&Path>, todo: &[(Way, &'static str, Fault)]) -> ExitCode {
    let before = job::files_in_memory();
    let networks = hosts::networks();
    let is_possible = |cell: &&(Way, _, _)| cell.0 != Way::Hosts || !networks.is_empty();
    let (todo, skipped): (Vec<_>, Vec<_>) = todo.iter().partition(is_possible);
    if !skipped.is_empty() {
        eprintln!(
            "SKIPPED: {} cells over hosts: tests/hosts/faults makes the networks that they need",
            skipped.len()
        );
    }
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for worker in 0..AT_ONCE {
            let network = networks.get(worker);
            if network.is_none() && !networks.is_empty() {
                break;
            }
            let (todo, next, done) = (&todo, &next, &done);
            scope.spawn(move || {
                while let Some(&&(way, operation, fault)) =
                    todo.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    let verdict = match (impossible(way, operation, fault), fault, network) {
                        (Some(reason), ..) => Verdict::NotApplicable(reason),
                        (None, Fault::OfHost(fault), Some(network)) => {
                            hosts::run(network, operation, fault)
                        }
                        _ => job::run(way, operation, fault),
                    };
                    if let Verdict::Failed(why) = &verdict {
                        eprintln!("FAILED {}/{operation}/{}: {why}", way.name(), fault.name());
                    }
                    let cell = Cell {
                        way,
                        operation,
                        fault,
                        verdict,
                    };
                    done.lock()
                        .unwrap_or_else(std::sync::PoisonError::into_inner)
                        .push(cell);
                }
            });
        }
    });
    let cells = done
        .into_inner()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let text = report::table(&cells);
    match report {
        Some(path) => {
            let old = std::fs::read_to_string(path).unwrap_or_default();
            let text = report::with_sections_of(&old, &text);
            if let Err(error) = std::fs::write(path, &text) {
                eprintln!("{}: {error}", path.display());
                return ExitCode::FAILURE;
            }
        }
        None => println!("{text}"),
    }
    let failed = cells
        .iter()
        .filter(|cell| matches!(cell.verdict, Verdict::Failed(_)))
        .count();
    let left = job::files_in_memory();
    let left: Vec<_> = left.iter().filter(|file| !before.contains(file)).collect();
    if !left.is_empty() {
        eprintln!("FAILED: left in /dev/shm: {left:?}");
    }
    eprintln!("{} cells, {failed} failed", cells.len());
    if failed == 0 && left.is_empty() && !cells.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Returns the reason why a cell is impossible.
fn impossible(way: Way, operation: &str, fault: Fault) -> Option<&'static str> {
    let before = matches!(operation, "rendezvous" | "connect");
    match (way, fault) {
        (Way::Threads, _) if before => Some("threads do not meet, they are made together"),
        (Way::Threads, Fault::Kill | Fault::Segv | Fault::Exit) => {
            Some("ends the process, and with it all ranks")
        }
        (Way::Threads, Fault::Stop) => Some("stops the process, and with it all ranks"),
        (Way::Threads, Fault::DropConnection | Fault::CorruptFrame) => {
            Some("threads have no connections")
        }
        (_, Fault::CorruptFrame) if before => Some("no frames before the group is connected"),
        (_, Fault::CorruptFrame) if operation == "idle" => Some("nothing is sent"),
        (_, Fault::Return) if before => Some("the program has nothing to return from yet"),
        (_, Fault::Return) if is_within(operation) => Some("it returns between operations"),
        (Way::Plain(Transport::Shm) | Way::Launched(Transport::Shm), Fault::CorruptFrame)
            if is_within(operation) =>
        {
            Some("data in shared memory have no checksum")
        }
        _ => None,
    }
}

/// Returns true if the fault strikes after the first data of the operation.
pub(crate) fn is_within(operation: &str) -> bool {
    operation.ends_with("_within")
}

impl Way {
    pub(crate) fn name(self) -> String {
        match self {
            Self::Plain(transport) => transport.name().to_owned(),
            Self::Launched(transport) => format!("launched-{}", transport.name()),
            Self::Threads => "threads".to_owned(),
            Self::Hosts => "hosts".to_owned(),
        }
    }

    pub(crate) fn title(self) -> String {
        match self {
            Self::Plain(transport) => format!("{}, without a launcher", transport.title()),
            Self::Launched(transport) => format!("{}, under `accel-launch`", transport.title()),
            Self::Threads => "Threads of one process".to_owned(),
            Self::Hosts => "Hosts, each with its own `accel-launch`".to_owned(),
        }
    }

    /// Returns the operations of this way. Only between hosts can the data of a leaving rank be lost in transit.
    pub(crate) fn operations(self) -> &'static [&'static str] {
        match self {
            Self::Hosts => &OPERATIONS,
            _ => &OPERATIONS[..OPERATIONS.len() - 1],
        }
    }

    /// Returns the faults of this way.
    pub(crate) fn faults(self) -> Vec<Fault> {
        match self {
            Self::Hosts => hosts::FAULTS.map(Fault::OfHost).to_vec(),
            _ => RANK_FAULTS.to_vec(),
        }
    }

    /// Returns the number of ranks.
    pub(crate) fn world_size(self) -> usize {
        match self.hosts() {
            1 => 3,
            hosts => 2 * hosts,
        }
    }

    /// Returns the number of hosts that the ranks see.
    pub(crate) fn hosts(self) -> usize {
        match self {
            Self::Plain(Transport::Hierarchical) | Self::Launched(Transport::Hierarchical) => 2,
            _ => 1,
        }
    }

    pub(crate) fn is_launched(self) -> bool {
        matches!(self, Self::Launched(_))
    }
}

impl Transport {
    /// Returns the name in `ACCEL_TRANSPORT`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Tcp => "tcp",
            Self::Hierarchical => "hierarchical",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::Shm => "Processes over shared memory",
            Self::Tcp => "Processes over TCP",
            Self::Hierarchical => "Processes on two hosts",
        }
    }
}

impl Fault {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Segv => "segv",
            Self::Exit => "exit",
            Self::Panic => "panic",
            Self::Return => "return",
            Self::Stop => "stop",
            Self::Slow => "slow",
            Self::DropConnection => "drop-connection",
            Self::CorruptFrame => "corrupt-frame",
            Self::OfHost(fault) => fault.name(),
        }
    }

    pub(crate) fn of(name: &str) -> Self {
        let mut faults = WAYS.into_iter().flat_map(Way::faults);
        faults
            .find(|fault| fault.name() == name)
            .unwrap_or_else(|| panic!("unknown fault {name}"))
    }

    /// Returns the action in a fault plan; `None` for a return, which the program itself does.
    pub(crate) fn action(self) -> Option<&'static str> {
        match self {
            Self::Exit => Some("exit 3"),
            Self::Return => None,
            Self::Slow => Some("slow 4s"),
            // The fault strikes during this pause.
            Self::OfHost(_) => Some("slow 1s"),
            other => Some(other.name()),
        }
    }

    /// Returns the deadline of the survivors: one second for a death, the liveness timeout for silence, the progress
    /// timeout for slowness, and the connect timeout for a rank that never came. [`ALLOWANCE`] comes on top.
    pub(crate) fn deadline(self, way: Way, operation: &str) -> Duration {
        let death = Duration::from_secs(1);
        // Without a launcher, nobody knows of a process that has not come.
        let unknown = operation == "rendezvous" && !way.is_launched();
        match self {
            _ if unknown => CONNECT,
            Self::Stop if operation == "rendezvous" => CONNECT,
            Self::Stop => LIVENESS,
            Self::Slow if matches!(operation, "rendezvous" | "connect") => CONNECT,
            Self::Slow => PROGRESS,
            _ => death,
        }
    }

    /// Returns the words for the cause, one of which must be in the survivors' error.
    pub(crate) fn words(self, way: Way, operation: &str) -> &'static [&'static str] {
        let launched = way.is_launched();
        match (self, operation) {
            // Nobody knows more about a process that has not come.
            (_, "rendezvous") if !launched => &["missing: rank 1"],
            (Self::Stop | Self::Slow, "rendezvous") => &["missing: rank 1"],
            (Self::DropConnection, "rendezvous") => &["ended with exit code 1"],
            (Self::Slow, "connect") => &["got no connection", "cannot connect to rank 1"],
            (Self::Kill, _) if launched => &["killed by SIGKILL"],
            (Self::Segv, _) if launched => &["killed by SIGSEGV"],
            (Self::Exit, _) if launched => &["ended with exit code 3"],
            (Self::Panic, "connect") if !launched => &["its connection"],
            (Self::Panic, _) => &["injected fault"],
            (Self::Kill | Self::Segv | Self::Exit, _) => &["its connection"],
            (Self::Return, _) => &["dropped its group without closing it"],
            (Self::Stop, _) => &["silent for"],
            (Self::Slow, _) => &["waited"],
            (Self::CorruptFrame, _) => &["a wrong checksum"],
            (Self::OfHost(fault), _) => fault.words(),
            // A process that is cut off ends, and the launcher reports that.
            (Self::DropConnection, _) if launched => &["its connection", "ended with exit code 1"],
            (Self::DropConnection, _) => &["its connection"],
        }
    }
}

/// The number of cells that run at once: most of them wait.
const AT_ONCE: usize = 8;
