//! Real processes meet without a launcher, or die or stop before they are connected.

use std::{
    env,
    io::{BufRead, BufReader, Read},
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use accelerator_collective::{
    GroupOptions, Launch, ProcessGroup,
    internal::{Report, StoreOptions, StoreServer},
};
use rustix::process::{Pid, Signal, kill_process};

/// Acts as a rank if the variables of a job are set, and otherwise does nothing.
#[test]
fn a_rank() {
    if env::var_os(MARK).is_none() {
        return;
    }
    // The log goes to the output too.
    tracing_subscriber::fmt().with_ansi(false).init();
    let connect_timeout = env::var(CONNECT_TIMEOUT).map_or(100, |seconds| seconds.parse().unwrap());
    let options = GroupOptions::new().with_connect_timeout(Duration::from_secs(connect_timeout));
    let outcome = ProcessGroup::connect(&Launch::from_env().unwrap(), &options);
    let text = match outcome {
        Ok(group) => format!("{} by {}", group.topology(), group.transport()),
        Err(error) => {
            let culprit = error.culprit().map(|x| (x.rank(), x.pid()));
            format!("{:?} {culprit:?} {error}", error.ranks())
        }
    };
    // The test harness has begun a line.
    println!("\n{MARK}{text}");
}

/// A process that ends with the test.
struct Process(Child);

impl Process {
    fn start(rank: usize, world_size: usize, port: u16, variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["meeting::a_rank", "--exact", "--nocapture"])
            .env(MARK, "1")
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", world_size.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("ACCEL_LIVENESS_TIMEOUT", "1")
            .envs(variables.iter().copied())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        Self(command.spawn().unwrap())
    }

    fn pid(&self) -> u32 {
        self.0.id()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid() as i32).unwrap();
        kill_process(pid, signal).unwrap();
    }

    /// Waits up to half a minute for a line of the rank's output that contains `what`.
    fn logs(&mut self, what: &'static str) -> String {
        let (sender, found) = mpsc::channel();
        let output = self.0.stdout.take().unwrap();
        thread::spawn(move || {
            let mut lines = BufReader::new(output).lines().map_while(Result::ok);
            // The receiver is gone only if the test has failed already.
            let _ = sender.send(lines.find(|line| line.contains(what)));
        });
        let found = found.recv_timeout(DEADLINE).expect("nothing is logged");
        found.expect("the rank has ended")
    }

    /// Returns the final line of the rank, for which it waits up to half a minute.
    fn said(mut self) -> String {
        let (sender, text) = mpsc::channel();
        let mut output = self.0.stdout.take().unwrap();
        thread::spawn(move || {
            let mut text = String::new();
            // The receiver is gone only if the test has failed already.
            let _ = output.read_to_string(&mut text);
            let _ = sender.send(text);
        });
        let text = text.recv_timeout(DEADLINE).expect("a rank still waits");
        let said = text.lines().find_map(|line| line.strip_prefix(MARK));
        said.unwrap_or_default().to_owned()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // The process has normally ended by now.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Asserts that this rank was named, with its process id and a cause.
fn assert_named(said: &str, rank: usize, pid: u32, cause: &str) {
    let head = format!("[{rank}] Some(({rank}, Some({pid}))) ");
    assert!(said.starts_with(&head), "{said}");
    assert!(said.contains(cause), "{said}");
}

/// Sends a signal to one of two ranks that wait for a third one.
fn while_gathering(signal: Signal, cause: &str) {
    let (sender, reports) = mpsc::channel();
    let options = StoreOptions::new(3).with_observer(move |report| {
        // The test may have failed already.
        let _ = sender.send(report);
    });
    let store = StoreServer::bind_with(("127.0.0.1", 0), options).unwrap();
    let port = store.local_addr().port();
    let launcher = [("ACCEL_STORE", "launcher")];
    let honest = Process::start(0, 3, port, &launcher);
    let struck = Process::start(1, 3, port, &launcher);
    for _ in 0..2 {
        let report = reports.recv_timeout(DEADLINE).unwrap();
        assert!(matches!(report, Report::Joined { .. }), "{report:?}");
    }
    let started = Instant::now();
    struck.signal(signal);
    assert_named(&honest.said(), 1, struck.pid(), cause);
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
}

#[test]
fn a_dead_rank_is_named_while_gathering_when_it_is_killed() {
    while_gathering(Signal::KILL, "its connection to the store ended");
}

#[test]
fn a_dead_rank_is_named_while_gathering_when_it_is_stopped() {
    while_gathering(Signal::STOP, "has been silent for 1");
}

#[test]
fn a_rank_that_waits_says_whom_for() {
    let store = StoreServer::bind(("127.0.0.1", 0), 4, None).unwrap();
    let port = store.local_addr().port();
    let start = |rank| Process::start(rank, 4, port, &[("ACCEL_STORE", "launcher")]);
    let (mut first, _third) = (start(0), start(2));
    let line = first.logs("has waited");
    assert!(line.contains("WARN"), "{line}");
    assert!(line.contains("rank 0 has waited 5"), "{line}");
    assert!(line.ends_with("missing: ranks 1 and 3"), "{line}");
}

/// Lets a fault strike a rank that knows all others and is connected to none. Rank 0 hosts the store.
#[cfg(feature = "faults")]
fn while_connecting(rank: usize, action: &str, causes: &[&str]) {
    let port = crate::ports::free_port();
    let plan = format!("rank={rank} connect {action}");
    let start = |rank| Process::start(rank, 3, port, &[("ACCEL_FAULTS", &plan)]);
    let started = Instant::now();
    let mut ranks: Vec<Process> = (0..3).map(start).collect();
    let struck = ranks.remove(rank);
    for honest in ranks {
        let said = honest.said();
        let cause = causes.iter().find(|cause| said.contains(**cause));
        let cause = cause.unwrap_or_else(|| panic!("{action}: {said}"));
        assert_named(&said, rank, struck.pid(), cause);
    }
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
}

#[test]
#[cfg(feature = "faults")]
fn a_dead_rank_is_named_while_connecting() {
    for action in ["kill", "segv", "exit 3", "panic", "drop-connection"] {
        while_connecting(1, action, &["its connection to the store ended"]);
    }
    while_connecting(1, "stop", &["has been silent for 1"]);
}

#[test]
#[cfg(feature = "faults")]
fn a_dead_rank_is_named_while_connecting_that_hosts_the_store() {
    for action in ["kill", "exit 3", "panic"] {
        // Some ranks may not have the table yet.
        let gone = ["is gone before the ranks", "and the store with it"];
        while_connecting(0, action, &gone);
    }
    while_connecting(0, "stop", &["has been silent for 1"]);
}

/// Rank 2 gives up on rank 1 and ends, and the launcher knows it at once.
#[test]
#[cfg(feature = "faults")]
fn a_rank_that_gives_up_is_believed_before_its_end_is_told() {
    let store = StoreServer::bind(("127.0.0.1", 0), 3, None).unwrap();
    let port = store.local_addr().port();
    let start = |rank, connect_timeout| {
        let variables = [
            ("ACCEL_STORE", "launcher"),
            ("ACCEL_FAULTS", "rank=1 connect slow 60s"),
            (CONNECT_TIMEOUT, connect_timeout),
        ];
        Process::start(rank, 3, port, &variables)
    };
    let (waits_long, _slow, gives_up) = (start(0, "60"), start(1, "60"), start(2, "5"));
    let blame = "[1] None rank 2 cannot connect to rank 1";
    let said = gives_up.said();
    store.report_exit(2, "it ended with exit code 1");
    assert!(said.starts_with(blame), "{said}");
    let said = waits_long.said();
    assert!(said.starts_with(blame), "{said}");
}

/// Returns the final lines of ranks with these variables, and with a store whose address does not show that they share
/// a host.
fn said_by_hand(variables: &[Vec<(&str, &str)>]) -> Vec<String> {
    let world_size = variables.len();
    let store = StoreServer::bind(("127.0.0.1", 0), world_size, None).unwrap();
    let port = store.local_addr().port();
    let ranks = variables.iter().enumerate().map(|(rank, variables)| {
        let common = [("MASTER_ADDR", "0.0.0.0"), ("ACCEL_STORE", "launcher")];
        let variables = [&common[..], variables].concat();
        Process::start(rank, world_size, port, &variables)
    });
    let ranks: Vec<Process> = ranks.collect();
    ranks.into_iter().map(Process::said).collect()
}

/// LOCAL_RANK is not set.
#[cfg(target_os = "linux")]
#[test]
fn ranks_that_are_started_by_hand_learn_their_local_ranks() {
    let said = said_by_hand(&vec![Vec::new(); 3]);
    let expected = [0, 1, 2].map(|rank| format!("rank {rank} of 3 (local {rank} of 3) by shm"));
    assert_eq!(said, expected);
    // A rank that has the variables fits in.
    let told = vec![("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")];
    let said = said_by_hand(&[Vec::new(), told]);
    let expected = [0, 1].map(|rank| format!("rank {rank} of 2 (local {rank} of 2) by shm"));
    assert_eq!(said, expected);
}

#[test]
fn ranks_with_one_local_rank_on_a_host_are_told() {
    let place = vec![("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")];
    for said in said_by_hand(&[place.clone(), place]) {
        assert!(said.starts_with("[0, 1] None "), "{said}");
        assert!(
            said.contains("ranks 0 and 1 have local rank 0 of 2"),
            "{said}"
        );
        assert!(said.contains("LOCAL_RANK"), "{said}");
    }
}

const MARK: &str = "MEETING_RANK";

/// The variable with the seconds that a rank waits for the others.
const CONNECT_TIMEOUT: &str = "MEETING_CONNECT_TIMEOUT";

/// A rank that takes longer hangs.
const DEADLINE: Duration = Duration::from_secs(30);

/// Three times the limit of a failure, for a busy machine.
const SOON: Duration = Duration::from_secs(9);
