//! Failures before the ranks are connected, with ranks and stores that the test plays.

use std::{
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use rustix::net::sockopt::set_socket_recv_buffer_size;

#[cfg(target_os = "linux")]
use super::address::{addresses_of, all_names, own_addresses};
use super::{Rendezvous, Report, StoreHost, StoreOptions, StorePlace, StoreServer, random};
use crate::element::ReduceOp;
use crate::error::{Error, Kind, Result};
use crate::group::{GroupOptions, ProcessGroup};
use crate::launch::Launch;
use crate::topology::{Topology, TransportKind};
use crate::transport::Tcp;
use crate::wire::message::{
    MAX_MESSAGE_RANKS, MAX_SHORT_BYTES, MAX_TABLE_BYTES, MAX_TEXT_BYTES, Message, Proves,
    RankTable, Registration,
};
use crate::wire::{ReadError, WireError, from_bytes, to_bytes};

const LIVENESS: Duration = Duration::from_secs(1);

/// A time longer than any failure should take and shorter than the connect timeout.
const SOON: Duration = Duration::from_secs(15);

fn options() -> GroupOptions {
    // Ranks that the test plays have no memory to share.
    GroupOptions::new()
        .with_transport(TransportKind::Tcp)
        .with_connect_timeout(Duration::from_secs(60))
        .with_liveness_timeout(LIVENESS)
}

/// Returns what a rank tells that waits a minute, and is taken for lost after two seconds.
pub(crate) fn registration(rank: usize, world_size: usize) -> Registration {
    Registration {
        rank,
        world_size,
        host: "here".to_owned(),
        pid: 100 + rank as u32,
        address: "127.0.0.1:1".parse().unwrap(),
        connect_timeout: Duration::from_secs(60),
        liveness: Duration::from_secs(2),
        transport: TransportKind::Auto,
        boot: None,
        local: None,
    }
}

/// Returns a store and its reports.
fn store(world_size: usize) -> (StoreServer, mpsc::Receiver<Report>) {
    let (sender, reports) = mpsc::channel();
    let options = StoreOptions::new(world_size).with_observer(move |report| {
        // The test may have ended.
        let _ = sender.send(report);
    });
    let server = StoreServer::bind_with(("127.0.0.1", 0), options).unwrap();
    (server, reports)
}

fn at(address: SocketAddr) -> Rendezvous {
    Rendezvous::new("127.0.0.1", address.port()).with_store(StoreHost::Launcher)
}

/// Ranks that connect on threads of their own.
struct Ranks(mpsc::Receiver<(usize, Result<ProcessGroup>)>, usize);

impl Ranks {
    fn start(ranks: &[usize], world_size: usize, rendezvous: &Rendezvous) -> Self {
        let (sender, outcomes) = mpsc::channel();
        for &rank in ranks {
            let topology = Topology::new(rank, world_size).unwrap();
            let launch = Launch::new(topology, rendezvous.clone());
            let sender = sender.clone();
            thread::spawn(move || {
                let outcome = ProcessGroup::connect(&launch, &options());
                // The receiver is gone only if the test has failed already.
                let _ = sender.send((rank, outcome));
            });
        }
        Self(outcomes, ranks.len())
    }

    fn outcomes(self) -> Vec<Result<ProcessGroup>> {
        let outcome = |_| self.0.recv_timeout(SOON).expect("a rank still waits");
        let mut all: Vec<_> = (0..self.1).map(outcome).collect();
        all.sort_by_key(|(rank, _)| *rank);
        all.into_iter().map(|(_, outcome)| outcome).collect()
    }

    fn errors(self) -> Vec<Error> {
        let errors = self.outcomes().into_iter();
        errors.map(|outcome| outcome.unwrap_err()).collect()
    }
}

/// A rank that registers and sends heartbeats, and does nothing more.
struct Odd {
    stream: TcpStream,
    beating: Arc<AtomicBool>,
    /// A listening socket whose connections are never accepted.
    listener: TcpListener,
}

impl Odd {
    fn register(store: SocketAddr, rank: usize, world_size: usize) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let stream = TcpStream::connect(store).unwrap();
        let hello = Message::Hello {
            nonce: random().unwrap(),
            job: String::new(),
            proves: Proves::Nothing,
        };
        hello.send(&stream).unwrap();
        let odd = Self {
            stream,
            beating: Arc::new(AtomicBool::new(true)),
            listener,
        };
        assert!(matches!(odd.hear(), Message::Challenge { .. }));
        let registration = Registration {
            host: "far".to_owned(),
            pid: 4711,
            address: odd.listener.local_addr().unwrap(),
            liveness: LIVENESS,
            transport: TransportKind::Tcp,
            ..registration(rank, world_size)
        };
        let body = to_bytes(&registration);
        odd.say(&Message::Register { body, proof: None });
        odd.live();
        odd
    }

    fn say(&self, message: &Message) {
        message.send(&self.stream).unwrap();
    }

    fn live(&self) {
        let stream = self.stream.try_clone().unwrap();
        let beating = Arc::clone(&self.beating);
        thread::spawn(move || {
            while beating.load(Ordering::Relaxed) && Message::Heartbeat.send(&stream).is_ok() {
                thread::sleep(LIVENESS / 20);
            }
        });
    }

    /// Stops the heartbeats, as if the rank were stopped.
    fn freeze(&self) {
        self.beating.store(false, Ordering::Relaxed);
    }

    /// Ends the connection to the store, as if the rank were dead. Its listener stays.
    fn die(&self) {
        self.freeze();
        self.stream.shutdown(Shutdown::Both).unwrap();
    }

    /// Returns the next message that is not a heartbeat.
    fn hear(&self) -> Message {
        loop {
            let deadline = Instant::now() + SOON;
            match Message::receive(&self.stream, MAX_TABLE_BYTES, deadline).unwrap() {
                Message::Heartbeat => {}
                message => return message,
            }
        }
    }

    fn table(&self) -> RankTable {
        match self.hear() {
            Message::Welcome { body, .. } => from_bytes(&body).unwrap(),
            other => panic!("unexpected {other:?}"),
        }
    }
}

fn wait_for(reports: &mpsc::Receiver<Report>, which: impl Fn(&Report) -> bool) -> Report {
    let deadline = Instant::now() + SOON;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let report = reports.recv_timeout(left).expect("the report came");
        if which(&report) {
            return report;
        }
    }
}

/// Asserts that the error names rank 2, which the test plays, and a cause.
fn assert_named(error: &Error, cause: &str) {
    assert!(error.is_peer_lost(), "{error}");
    assert_eq!(error.ranks(), [2], "{error}");
    let text = error.to_string();
    assert!(text.contains("rank 2 (process 4711 on far)"), "{text}");
    assert!(text.contains(cause), "{text}");
    let culprit = error.culprit().unwrap();
    assert_eq!((culprit.host(), culprit.pid()), ("far", Some(4711)));
}

#[test]
fn a_testimony_ends_the_wait_at_once() {
    let (server, reports) = store(4);
    let ranks = Ranks::start(&[0, 1], 4, &at(server.local_addr()));
    let _odd = Odd::register(server.local_addr(), 2, 4);
    for _ in 0..3 {
        wait_for(&reports, |report| matches!(report, Report::Joined { .. }));
    }
    server.report_exit(2, "it was killed by SIGKILL");
    for error in ranks.errors() {
        assert_named(&error, "was killed by SIGKILL before the ranks had met");
    }
    let Report::Failed(report) = wait_for(&reports, |x| matches!(x, Report::Failed(_))) else {
        unreachable!("it was waited for");
    };
    assert_eq!(report.blamed, [2]);
    assert!(!report.is_self_reported());
    assert!(report.error().is_peer_lost());
    // A rank that comes now gets the error at once, too.
    let late = Ranks::start(&[3], 4, &at(server.local_addr())).errors();
    assert_named(&late[0], "SIGKILL");
}

#[test]
fn a_rank_that_gives_up_is_heard_by_all() {
    let (server, reports) = store(3);
    let ranks = Ranks::start(&[0, 1], 3, &at(server.local_addr()));
    let odd = Odd::register(server.local_addr(), 2, 3);
    odd.table();
    let error = Error::about(
        Kind::Rendezvous,
        vec![2],
        "rank 2 (process 4711 on far) panicked: no memory",
    );
    odd.say(&Message::ReportFailure(WireError::bounded(
        &error,
        MAX_TEXT_BYTES,
        MAX_MESSAGE_RANKS,
    )));
    for error in ranks.errors() {
        assert!(error.is_rendezvous());
        assert!(error.to_string().contains("panicked: no memory"), "{error}");
    }
    let failed = |x: &Report| matches!(x, Report::Failed(x) if x.rank == 2);
    let Report::Failed(report) = wait_for(&reports, failed) else {
        unreachable!("it was waited for");
    };
    assert!(report.is_self_reported());
}

/// The store is killed, so its sockets end without a message.
#[test]
fn a_store_that_is_gone_ends_the_wait() {
    for (host, lost) in [(StoreHost::Launcher, false), (StoreHost::Rank0, true)] {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let ranks = Ranks::start(&[1], 2, &at(address).with_store(host));
        let (stream, _) = listener.accept().unwrap();
        let deadline = Instant::now() + SOON;
        let hello = Message::receive(&stream, MAX_SHORT_BYTES, deadline).unwrap();
        assert!(matches!(hello, Message::Hello { .. }));
        let nonce = random().unwrap();
        let challenge = Message::Challenge {
            nonce,
            proof: None,
            host: "far".to_owned(),
            pid: 4711,
        };
        challenge.send(&stream).unwrap();
        let register = Message::receive(&stream, MAX_SHORT_BYTES, deadline).unwrap();
        assert!(matches!(register, Message::Register { .. }));
        let started = Instant::now();
        drop((stream, listener));
        let error = &ranks.errors()[0];
        assert_eq!(error.is_peer_lost(), lost, "{error}");
        assert_eq!(error.is_rendezvous(), !lost, "{error}");
        let text = error.to_string();
        assert!(text.contains("is gone before the ranks had met"), "{text}");
        assert!(text.contains("(process 4711 on far)"), "{text}");
        assert_eq!(error.culprit().and_then(|x| x.pid()), lost.then_some(4711));
        assert!(started.elapsed() < 3 * Duration::from_secs(1));
    }
}

#[test]
fn connected_ranks_outlive_the_store() {
    let (server, reports) = store(2);
    let ranks = Ranks::start(&[0, 1], 2, &at(server.local_addr()));
    let groups: Vec<_> = ranks.outcomes().into_iter().map(|x| x.unwrap()).collect();
    wait_for(&reports, |report| matches!(report, Report::Met));
    drop(server);
    thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || {
                let mut values = [1_u32];
                group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
                assert_eq!(values, [2]);
                group.close().unwrap();
            });
        }
    });
}

/// A stopped rank reads nothing, and messages to the others must not wait for it.
#[test]
fn a_rank_that_reads_nothing_delays_nobody() {
    let (server, _reports) = store(3);
    let odds: Vec<Odd> = (0..3)
        .map(|rank| Odd::register(server.local_addr(), rank, 3))
        .collect();
    let (quick, stopped) = (&odds[0], &odds[2]);
    set_socket_recv_buffer_size(&stopped.stream, 4096).unwrap();
    assert_eq!(quick.table().ranks.len(), 3);
    odds.iter().for_each(|odd| odd.say(&Message::Connected));
    // This is far more than the buffers of a connection hold.
    let text = |number: usize| format!("{number:0>1900}");
    let started = Instant::now();
    for number in 0..8000 {
        server.report_exit(1, text(number));
        match quick.hear() {
            Message::ExitNotice {
                rank: 1,
                text: heard,
            } => assert_eq!(heard, text(number)),
            other => panic!("unexpected {other:?}"),
        }
        assert!(started.elapsed() < 4 * SOON, "after {number}");
    }
    // With the small buffer, only the system's timers would send the rest.
    set_socket_recv_buffer_size(&stopped.stream, 1 << 20).unwrap();
    // The messages that it finds when it wakes up are complete and in order, until the store gave it up.
    stopped.freeze();
    assert_eq!(stopped.table().ranks.len(), 3);
    let mut number = 0;
    loop {
        let deadline = Instant::now() + SOON;
        match Message::receive(&stopped.stream, MAX_TABLE_BYTES, deadline) {
            Ok(Message::ExitNotice {
                rank: 1,
                text: heard,
            }) => {
                assert_eq!(heard, text(number));
                number += 1;
            }
            // Heartbeats are possible on a busy machine.
            Ok(Message::Heartbeat) => {}
            Ok(other) => panic!("unexpected {other:?}"),
            Err(ReadError::Closed | ReadError::Torn | ReadError::Io(_)) => break,
            Err(error) => panic!("{error}"),
        }
        assert!(number < 8000, "it was never given up");
    }
}

#[test]
fn idle_connections_keep_nobody_out_of_the_store() {
    let (server, _reports) = store(3);
    let idle: Vec<TcpStream> = (0..200)
        .map(|_| TcpStream::connect(server.local_addr()).unwrap())
        .collect();
    let ranks = Ranks::start(&[0, 1, 2], 3, &at(server.local_addr()));
    for outcome in ranks.outcomes() {
        outcome.unwrap();
    }
    drop(idle);
}

#[test]
fn idle_connections_keep_nobody_out_of_a_rank() {
    let (server, _reports) = store(3);
    let ranks = Ranks::start(&[0, 1], 3, &at(server.local_addr()));
    let odd = Odd::register(server.local_addr(), 2, 3);
    let table = odd.table();
    // Ranks 0 and 1 wait for rank 2, which sends strangers first.
    let idle: Vec<TcpStream> = (0..400)
        .map(|index| TcpStream::connect(table.ranks[index % 2].address).unwrap())
        .collect();
    let key = super::Key::of_job(&table.secret, None);
    let meeting = super::Meeting {
        ranks: table.ranks,
        listener: odd.listener.try_clone().unwrap(),
        key,
        store: None,
    };
    let topology = Topology::new(2, 3).unwrap();
    let transport = Tcp::connect(&topology, meeting, SOON);
    for outcome in ranks.outcomes() {
        outcome.unwrap();
    }
    drop((idle, transport.unwrap()));
}

/// Any program that listens there can send any text.
#[test]
fn the_words_of_a_store_that_has_proved_nothing_are_not_shown() {
    let hostile = "\u{1b}[2Jall your files are gone\u{7}";
    let token = super::Token::generate().unwrap();
    for (kind, token, own) in [
        (
            Kind::Misuse,
            Some(&token),
            "before it proved that it is the store",
        ),
        (
            Kind::Rendezvous,
            Some(&token),
            "it serves another job, and a rank of the job",
        ),
        (
            Kind::Unauthorized,
            Some(&token),
            "it has no token, but this rank has",
        ),
        (
            Kind::Unauthorized,
            None,
            "set ACCEL_TOKEN_FILE for every process",
        ),
    ] {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut rendezvous = at(listener.local_addr().unwrap());
        if let Some(token) = token {
            rendezvous = rendezvous.with_token(token.clone());
        }
        let ranks = Ranks::start(&[1], 2, &rendezvous);
        let (stream, _) = listener.accept().unwrap();
        let deadline = Instant::now() + SOON;
        Message::receive(&stream, MAX_SHORT_BYTES, deadline).unwrap();
        let refusal = Error::about(kind, vec![7], hostile);
        Message::Refused(WireError::new(&refusal))
            .send(&stream)
            .unwrap();
        let error = ranks.errors().remove(0);
        let text = error.to_string();
        assert!(text.contains(own) && !text.contains("files"), "{text}");
        assert!(error.ranks().is_empty(), "{error:?}");
    }
}

#[test]
fn loopback_stays_on_loopback() {
    for attempt in 0.. {
        let port = {
            let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
            listener.local_addr().unwrap().port()
        };
        let rendezvous = Rendezvous::new("127.0.0.1", port);
        let topology = Topology::new(0, 2).unwrap();
        let addresses = [SocketAddr::from(([127, 0, 0, 1], port))];
        let server = match rendezvous.serve(StorePlace::at(addresses), &topology, None) {
            // Another process has taken the port.
            Err(error) if error.is_address_in_use() && attempt < 5 => continue,
            other => other.unwrap(),
        };
        assert!(server.local_addr().ip().is_loopback());
        let ranks = Ranks::start(&[1], 2, &at(server.local_addr()));
        let odd = Odd::register(server.local_addr(), 0, 2);
        assert!(odd.table().ranks[1].address.ip().is_loopback());
        odd.die();
        ranks.errors();
        return;
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_rank_listens_at_the_interface_that_is_named() {
    // The interface is in the network if this machine has one there.
    let own = own_addresses()[0];
    let has_it = |name: &String| addresses_of(name).is_ok_and(|addresses| addresses.contains(&own));
    let name = all_names().into_iter().find(has_it).unwrap();
    let (server, _reports) = store(2);
    let at_interface = at(server.local_addr()).with_network_interface(name);
    let ranks = Ranks::start(&[1], 2, &at_interface);
    let odd = Odd::register(server.local_addr(), 0, 2);
    let told = odd.table().ranks[1].address;
    assert_eq!(told.ip().is_ipv4(), own.is_ipv4(), "{told} {own}");
    assert!(
        own.is_loopback() || !told.ip().is_loopback(),
        "{told} {own}"
    );
    drop(TcpStream::connect(told).unwrap());
    odd.die();
    ranks.errors();
}

#[test]
fn an_interface_that_is_not_there_is_an_error_of_the_rank() {
    let (server, _reports) = store(2);
    let rendezvous = at(server.local_addr()).with_network_interface("eth99,ib99");
    for error in Ranks::start(&[1], 2, &rendezvous).errors() {
        assert!(error.is_topology(), "{error}");
        let says = "ACCEL_NETWORK_INTERFACE is \"eth99,ib99\": this host has no such network interface; it has ";
        assert!(error.to_string().contains(says), "{error}");
    }
}
