//! The rendezvous of ranks, and their errors if it fails.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use accelerator_collective::internal::{Rendezvous, StoreHost, StoreOptions, StoreServer, Token};
use accelerator_collective::{
    Error, GroupOptions, Launch, ProcessGroup, ReduceOp, Result, Topology, TransportKind,
};

use crate::ports::{RefusingAddress, free_port};

/// Connects ranks, each on a thread of its own, and returns the outcomes in order. Fails after a minute.
fn connect(launches: Vec<Launch>, options: &GroupOptions) -> Vec<Result<ProcessGroup>> {
    let (sender, outcomes) = mpsc::channel();
    let count = launches.len();
    for (index, launch) in launches.into_iter().enumerate() {
        let (options, sender) = (options.clone(), sender.clone());
        thread::spawn(move || {
            let outcome = ProcessGroup::connect(&launch, &options);
            // The receiver is gone only if the test has failed already.
            let _ = sender.send((index, outcome));
        });
    }
    let mut all: Vec<_> = (0..count)
        .map(|_| outcomes.recv_timeout(Duration::from_secs(60)).unwrap())
        .collect();
    all.sort_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, outcome)| outcome).collect()
}

fn errors(launches: Vec<Launch>, timeout: Duration) -> Vec<Error> {
    let options = GroupOptions::new().with_connect_timeout(timeout);
    let outcomes = connect(launches, &options).into_iter();
    outcomes.map(|outcome| outcome.unwrap_err()).collect()
}

fn launch(rank: usize, world_size: usize, rendezvous: &Rendezvous) -> Launch {
    Launch::new(Topology::new(rank, world_size).unwrap(), rendezvous.clone())
}

fn at(store: &StoreServer) -> Rendezvous {
    Rendezvous::new("127.0.0.1", store.local_addr().port()).with_store(StoreHost::Launcher)
}

/// The best transport for ranks of one host.
const BEST: TransportKind = match cfg!(target_os = "linux") {
    true => TransportKind::Shm,
    false => TransportKind::Tcp,
};

/// Asserts that all ranks of a complete job connect and compute.
fn assert_whole(launches: Vec<Launch>) {
    let world_size = launches.len();
    let groups = connect(launches, &GroupOptions::new());
    let groups: Vec<ProcessGroup> = groups.into_iter().map(|group| group.unwrap()).collect();
    thread::scope(|scope| {
        for group in groups {
            scope.spawn(move || {
                let mut values = [1_u32];
                group.all_reduce(&mut values, ReduceOp::Sum).unwrap();
                assert_eq!(values, [world_size as u32]);
                assert_eq!(group.transport(), BEST);
            });
        }
    });
}

const SHORT: Duration = Duration::from_secs(2);
const LONG: Duration = Duration::from_secs(50);

/// Returns the outcomes of a job whose rank 0 hosts the store itself.
fn hosted_by_rank_0(
    ranks: &[usize],
    world_size: usize,
    timeout: Duration,
) -> Vec<Result<ProcessGroup>> {
    let options = GroupOptions::new().with_connect_timeout(timeout);
    let rendezvous = Rendezvous::new("localhost", free_port());
    let launches = ranks
        .iter()
        .map(|rank| launch(*rank, world_size, &rendezvous));
    connect(launches.collect(), &options)
}

#[test]
fn rank_0_hosts_the_store_where_no_launcher_does() {
    for outcome in hosted_by_rank_0(&[0, 1, 2], 3, LONG) {
        outcome.unwrap().close().unwrap();
    }
}

#[test]
fn rank_0_tells_everyone_before_its_store_goes() {
    for outcome in hosted_by_rank_0(&[0, 1], 4, SHORT) {
        let error = outcome.unwrap_err();
        assert!(error.is_rendezvous(), "{error}");
        assert_eq!(error.ranks(), [2, 3], "{error}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_to_all_present() {
    let store = StoreServer::bind(("127.0.0.1", 0), 3, None).unwrap();
    let launches = vec![launch(0, 3, &at(&store)), launch(2, 3, &at(&store))];
    let started = Instant::now();
    for error in errors(launches, SHORT) {
        assert!(error.is_rendezvous(), "{error}");
        assert_eq!(error.ranks(), [1], "{error}");
        let text = error.to_string();
        assert!(text.contains("2 of 3 ranks came within"), "{text}");
        assert!(text.contains("missing: rank 1; start as many"), "{text}");
    }
    assert!(started.elapsed() >= SHORT / 2);
}

#[test]
fn a_process_that_joins_twice_is_told_at_once() {
    let store = StoreServer::bind(("127.0.0.1", 0), 3, None).unwrap();
    let launches = [0, 1, 1].map(|rank| launch(rank, 3, &at(&store)));
    let all = errors(launches.into(), LONG);
    for error in &all {
        assert!(error.is_rendezvous(), "{error}");
        assert!(
            error
                .to_string()
                .contains("has joined this job already, as rank 1"),
            "{error}"
        );
    }
}

/// Options and environment that ask for the same transport agree.
#[test]
fn the_same_transport_may_be_asked_for_in_two_ways() {
    let store = StoreServer::bind(("127.0.0.1", 0), 2, None).unwrap();
    let told = GroupOptions::new().with_transport(TransportKind::Tcp);
    let mut launches = [0, 1].map(|rank| launch(rank, 2, &at(&store)));
    launches[1].transport = TransportKind::Tcp;
    let [by_options, by_environment] = launches;
    thread::scope(|scope| {
        let first = scope.spawn(|| ProcessGroup::connect(&by_options, &told).unwrap());
        let second = ProcessGroup::connect(&by_environment, &GroupOptions::new()).unwrap();
        let first = first.join().unwrap();
        assert_eq!(first.transport(), second.transport());
    });
}

/// Connecting has a timeout of its own.
#[test]
fn the_progress_timeout_does_not_bound_connecting() {
    let store = StoreServer::bind(("127.0.0.1", 0), 4, None).unwrap();
    let launches = (0..4).map(|rank| launch(rank, 4, &at(&store)));
    let options = GroupOptions::new().with_progress_timeout(Duration::from_nanos(1));
    for outcome in connect(launches.collect(), &options) {
        assert_eq!(outcome.unwrap().transport(), BEST);
    }
}

#[test]
fn a_taken_port_is_named() {
    let taken = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = taken.local_addr().unwrap().port();
    let error = StoreServer::bind(("127.0.0.1", port), 2, None).unwrap_err();
    assert!(error.is_address_in_use(), "{error}");
    assert!(error.to_string().contains(&port.to_string()), "{error}");

    let rendezvous = Rendezvous::new("127.0.0.1", port);
    let error = &errors(vec![launch(0, 2, &rendezvous)], SHORT)[0];
    assert!(error.is_address_in_use(), "{error}");
}

#[test]
fn a_store_that_is_not_there_is_named() {
    let nobody = RefusingAddress::take();
    let port = nobody.address().port();
    let rendezvous = Rendezvous::new("127.0.0.1", port);
    let error = &errors(vec![launch(1, 2, &rendezvous)], Duration::from_millis(300))[0];
    assert!(error.is_rendezvous(), "{error}");
    let place = format!("rank 1 and the store at 127.0.0.1:{port}");
    assert!(error.to_string().starts_with(&place), "{error}");
}

#[test]
fn a_server_of_another_kind_is_named() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream
            .write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            .unwrap();
        let mut rest = Vec::new();
        // The server ignores what the rank sends and how it ends.
        let _ = stream.read_to_end(&mut rest);
    });
    let rendezvous = Rendezvous::new("127.0.0.1", port);
    let error = &errors(vec![launch(1, 2, &rendezvous)], LONG)[0];
    assert!(error.is_protocol(), "{error}");
    assert!(
        error.to_string().contains("is no store of this library"),
        "{error}"
    );
    server.join().unwrap();
}

#[test]
fn who_listens_and_does_not_answer_is_taken_for_another_program() {
    let never_accepts = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let never_answers = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let closes = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let ports = [&never_accepts, &never_answers, &closes]
        .map(|listener| listener.local_addr().unwrap().port());
    thread::spawn(move || never_answers.incoming().flatten().collect::<Vec<_>>());
    thread::spawn(move || closes.incoming().for_each(drop));
    let told = |rendezvous: Rendezvous, why: &str| {
        let error = &errors(vec![launch(1, 2, &rendezvous)], SHORT)[0];
        assert!(error.is_rendezvous(), "{error}");
        let text = error.to_string();
        assert!(text.contains("something listens there, but it "), "{text}");
        assert!(
            text.contains("does another program use this port?"),
            "{text}"
        );
        assert!(text.contains(why) && !text.contains("is rank 0"), "{text}");
    };
    // The ranks run at the same time, since each gives up only after its timeout.
    thread::scope(|scope| {
        for (port, why) in ports.into_iter().zip(["accepted", "", ""]) {
            let rendezvous = Rendezvous::new("127.0.0.1", port);
            let with_token = rendezvous.clone().with_token(Token::generate().unwrap());
            scope.spawn(move || told(rendezvous, why));
            scope.spawn(move || told(with_token, ""));
        }
    });
}

#[test]
fn a_store_that_goes_away_is_noticed() {
    let store = StoreServer::bind(("127.0.0.1", 0), 2, None).unwrap();
    let launches = vec![launch(0, 2, &at(&store))];
    let closer = thread::spawn(move || {
        thread::sleep(Duration::from_millis(500));
        drop(store);
    });
    let error = &errors(launches, SHORT)[0];
    assert!(error.is_rendezvous(), "{error}");
    closer.join().unwrap();
}

#[test]
fn a_shared_token_lets_ranks_in() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    let token = Token::generate().unwrap();
    token.write_file(&path).unwrap();
    let store = StoreServer::bind(("127.0.0.1", 0), 2, Some(token.clone())).unwrap();
    assert_whole(vec![
        launch(0, 2, &at(&store).with_token(token)),
        launch(1, 2, &at(&store).with_token_file(path)),
    ]);
}

#[test]
fn a_wrong_token_is_refused_and_the_job_continues() {
    let token = Token::generate().unwrap();
    let store = StoreServer::bind(("127.0.0.1", 0), 2, Some(token.clone())).unwrap();
    let wrong = at(&store).with_token(Token::generate().unwrap());
    let error = &errors(vec![launch(0, 2, &wrong)], LONG)[0];
    assert!(error.is_unauthorized(), "{error}");
    assert!(
        error
            .to_string()
            .contains("its token is not the token of this rank"),
        "{error}"
    );

    let error = &errors(vec![launch(0, 2, &at(&store))], LONG)[0];
    assert!(error.is_unauthorized(), "{error}");
    assert!(
        error.to_string().contains("set ACCEL_TOKEN_FILE"),
        "{error}"
    );

    let right = at(&store).with_token(token);
    assert_whole(vec![launch(0, 2, &right), launch(1, 2, &right)]);
}

#[test]
fn a_store_without_the_token_is_not_trusted() {
    let store = StoreServer::bind(("127.0.0.1", 0), 2, None).unwrap();
    let rendezvous = at(&store).with_token(Token::generate().unwrap());
    let error = &errors(vec![launch(0, 2, &rendezvous)], LONG)[0];
    assert!(error.is_unauthorized(), "{error}");
    assert!(
        error
            .to_string()
            .contains("it has no token, but this rank has"),
        "{error}"
    );
    assert_whole(vec![launch(0, 2, &at(&store)), launch(1, 2, &at(&store))]);
}

#[test]
fn a_token_file_that_is_missing_is_named() {
    let store = StoreServer::bind(("127.0.0.1", 0), 2, None).unwrap();
    let rendezvous = at(&store).with_token_file("/nonexistent/token");
    let error = &errors(vec![launch(0, 2, &rendezvous)], LONG)[0];
    assert!(error.is_unauthorized(), "{error}");
    assert!(error.to_string().contains("/nonexistent/token"), "{error}");
}

#[test]
fn a_rank_of_another_job_is_refused_and_the_job_continues() {
    let options = StoreOptions::new(2).with_job("mine");
    let store = StoreServer::bind_with(("127.0.0.1", 0), options).unwrap();
    let other = at(&store).with_job("other");
    let error = &errors(vec![launch(1, 2, &other)], LONG)[0];
    assert!(error.is_rendezvous(), "{error}");
    assert!(error.to_string().contains("the job \"other\""), "{error}");
    assert!(
        !error.to_string().contains("mine"),
        "told to a stranger: {error}"
    );
    let mine = at(&store).with_job("mine");
    assert_whole(vec![launch(0, 2, &mine), launch(1, 2, &mine)]);
    // A process cannot join after all ranks have met and left either.
    let error = &errors(vec![launch(1, 2, &mine)], LONG)[0];
    assert!(
        error
            .to_string()
            .contains("has joined this job already, as rank 1"),
        "{error}"
    );
}

#[test]
fn strangers_do_not_disturb() {
    let store = StoreServer::bind(("127.0.0.1", 0), 3, None).unwrap();
    let mut silent = Vec::new();
    for index in 0..40 {
        let mut stream = TcpStream::connect(store.local_addr()).unwrap();
        match index % 4 {
            0 => stream
                .write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                .unwrap(),
            // The header is right, but the length is too large to allocate.
            1 => stream
                .write_all(b"ACLR\x03\0\0\0\xff\xff\xff\xff\0\0\0\0")
                .unwrap(),
            2 => {}
            _ => {
                silent.push(stream);
                continue;
            }
        }
        drop(stream);
    }
    assert_whole((0..3).map(|rank| launch(rank, 3, &at(&store))).collect());
    drop(silent);
}

#[test]
fn another_version_is_refused_in_words() {
    let store = StoreServer::bind(("127.0.0.1", 0), 2, None).unwrap();
    let mut stream = TcpStream::connect(store.local_addr()).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(30)))
        .unwrap();
    stream
        .write_all(b"ACLR\x09\0\0\0\x01\0\0\0\0\0\0\0x")
        .unwrap();
    let mut answer = Vec::new();
    // The store may end the connection with bytes unread.
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.contains("protocol version 9, expected "), "{answer}");

    // The job keeps waiting, and mentions the visitor when it fails.
    let error = &errors(vec![launch(0, 2, &at(&store))], SHORT)[0];
    assert!(error.to_string().contains("missing: rank 1"), "{error}");
    assert!(error.to_string().contains("protocol version 9"), "{error}");
}

#[test]
fn misleading_options_are_refused() {
    let rendezvous = Rendezvous::new("127.0.0.1", 1);
    let launch = launch(0, 2, &rendezvous);
    let options = GroupOptions::new().with_transport(TransportKind::Threads);
    let error = ProcessGroup::connect(&launch, &options).unwrap_err();
    assert!(error.is_misuse(), "{error}");
    let options = GroupOptions::new().with_transport(TransportKind::Tcp);
    assert!(ProcessGroup::threads(2, &options).unwrap_err().is_misuse());
    let options = GroupOptions::new().with_connect_timeout(Duration::ZERO);
    assert!(
        ProcessGroup::connect(&launch, &options)
            .unwrap_err()
            .is_misuse()
    );
    assert!(
        ProcessGroup::threads(0, &GroupOptions::new())
            .unwrap_err()
            .is_topology()
    );
    assert!(
        StoreServer::bind(("127.0.0.1", 0), 0, None)
            .unwrap_err()
            .is_topology()
    );
}
