use std::{
    io::{BufRead, BufReader},
    net::{Shutdown, TcpListener},
    os::unix::net::UnixStream,
    thread,
};

use super::*;

const SOON: Duration = Duration::from_secs(20);

/// A launcher's answer to a command, if any.
type Answers = fn(command: &str, key: &Shared) -> Option<String>;

/// The state of a test's server.
struct Shared {
    ranks: usize,
    arrived: Mutex<usize>,
    value: Mutex<Option<String>>,
}

/// Gives Hydra's answers.
fn hydra(line: &str, shared: &Shared) -> Option<String> {
    let answer = Answer::parse(line);
    Some(match answer.command() {
        "init" => "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0".to_owned(),
        "get_my_kvsname" => "cmd=my_kvsname kvsname=kvs_77_0".to_owned(),
        "put" => {
            assert_eq!(answer.value("kvsname").unwrap(), "kvs_77_0");
            *shared.value.lock() = Some(answer.value("value").unwrap().to_owned());
            "cmd=put_result rc=0 msg=success".to_owned()
        }
        "barrier_in" => {
            *shared.arrived.lock() += 1;
            while *shared.arrived.lock() < shared.ranks {
                thread::sleep(Duration::from_millis(1));
            }
            "cmd=barrier_out".to_owned()
        }
        "get" => match &*shared.value.lock() {
            Some(value) => format!("cmd=get_result rc=0 msg=success value={value}"),
            None => "cmd=get_result rc=-1 msg=key_not_found".to_owned(),
        },
        "finalize" => "cmd=finalize_ack".to_owned(),
        _ => return None,
    })
}

/// Serves one rank until it leaves, and returns its commands.
fn serve(stream: UnixStream, answers: Answers, shared: &Shared) -> Vec<String> {
    let mut commands = Vec::new();
    let mut writer = stream.try_clone().unwrap();
    for line in BufReader::new(stream).lines() {
        let Ok(line) = line else { break };
        commands.push(Answer::parse(&line).command().to_owned());
        if let Some(answer) = answers(&line, shared) {
            // The answer comes in two pieces, as a socket may deliver it.
            let (first, rest) = answer.split_at(answer.len() / 2);
            let sent = writer
                .write_all(first.as_bytes())
                .and_then(|()| writer.write_all(format!("{rest}\n").as_bytes()));
            if sent.is_err() {
                break;
            }
        }
        if commands.last().is_some_and(|command| command == "finalize") {
            break;
        }
    }
    let _ = writer.shutdown(Shutdown::Both);
    commands
}

/// Returns what each rank gets of rank 0's line, and each rank's commands.
fn exchange(
    ranks: usize,
    own: Option<&str>,
    answers: Answers,
    limit: Duration,
) -> Vec<(Result<String>, Vec<String>)> {
    let shared = Shared {
        ranks,
        arrived: Mutex::new(0),
        value: Mutex::new(None),
    };
    thread::scope(|scope| {
        let started: Vec<_> = (0..ranks)
            .map(|rank| {
                let (ours, theirs) = UnixStream::pair().unwrap();
                let server = scope.spawn(|| serve(theirs, answers, &shared));
                let client = scope.spawn(move || {
                    let client = PmiClient::new(ours.into(), Instant::now() + limit);
                    client.share(own.filter(|_| rank == 0))
                });
                (client, server)
            })
            .collect();
        let ended = started
            .into_iter()
            .map(|(client, server)| (client.join().unwrap(), server.join().unwrap()));
        ended.collect()
    })
}

#[test]
fn every_rank_gets_what_rank_0_says() {
    for (told, commands) in exchange(3, Some("accel1_1__10.0.0.1"), hydra, SOON) {
        assert_eq!(told.unwrap(), "accel1_1__10.0.0.1");
        let others = commands.iter().filter(|command| *command != "put");
        let expected = ["init", "get_my_kvsname", "barrier_in", "get", "finalize"];
        assert!(others.eq(expected), "{commands:?}");
    }
}

#[test]
fn words_may_come_in_any_order() {
    fn slurm(line: &str, shared: &Shared) -> Option<String> {
        let answer = hydra(line, shared)?;
        let mut words: Vec<_> = answer.split(' ').collect();
        words.reverse();
        Some(format!("{}  rc=0 ", words.join("  ")).replace("rc=0   rc=0", "rc=0"))
    }
    let (told, _) = exchange(1, Some("x"), slurm, SOON).remove(0);
    assert_eq!(told.unwrap(), "x");
}

#[test]
fn a_key_that_nobody_has_put_is_an_error() {
    let (told, commands) = exchange(1, None, hydra, SOON).remove(0);
    let error = told.unwrap_err();
    assert!(
        error.is_protocol() && error.to_string().contains("\"get\""),
        "{error}"
    );
    assert_eq!(
        commands.last().unwrap(),
        "finalize",
        "or the launcher kills the job"
    );
    fn slurm(line: &str, shared: &Shared) -> Option<String> {
        Some(match Answer::parse(line).command() {
            "get" => "cmd=get_result rc=0 found=false value=x".to_owned(),
            _ => hydra(line, shared)?,
        })
    }
    assert!(exchange(1, None, slurm, SOON).remove(0).0.is_err());
}

#[test]
fn wrong_answers_are_errors() {
    let cases: [(Answers, &str); 6] = [
        (|_, _| Some(String::new()), "\"init\" with \"\""),
        (
            |_, _| Some("cmd=response_to_init rc=-1".to_owned()),
            "rc=-1",
        ),
        (|_, _| Some("\u{7f}\u{1}=\u{2}".to_owned()), "\"init\""),
        (|_, _| Some("cmd=barrier_out".to_owned()), "barrier_out"),
        (|_, _| Some("x".repeat(20_000)), "\"init\""),
        (
            |line, shared| match Answer::parse(line).command() {
                "get_my_kvsname" => Some("cmd=my_kvsname".to_owned()),
                _ => hydra(line, shared),
            },
            "no kvsname",
        ),
    ];
    for (answers, part) in cases {
        let (told, _) = exchange(1, Some("x"), answers, SOON).remove(0);
        let error = told.unwrap_err();
        assert!(error.is_protocol(), "{error}");
        assert!(error.to_string().contains(part), "{part:?}: {error}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_waited_for_in_vain() {
    fn alone(line: &str, shared: &Shared) -> Option<String> {
        match Answer::parse(line).command() {
            "barrier_in" => None,
            _ => hydra(line, shared),
        }
    }
    let (told, commands) = exchange(1, Some("x"), alone, Duration::from_millis(300)).remove(0);
    let error = told.unwrap_err();
    assert!(error.is_rendezvous(), "{error}");
    assert!(error.to_string().contains("not every rank"), "{error}");
    assert_eq!(commands.last().unwrap(), "finalize");
}

#[test]
fn a_launcher_that_is_gone_is_an_error() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(theirs);
    let error = PmiClient::new(ours.into(), Instant::now() + SOON).share(Some("x"));
    assert!(error.unwrap_err().is_rendezvous());
}

#[test]
fn a_launcher_that_is_asked_tells_the_place() {
    for answer in [
        "cmd=initack\ncmd=set size=4\ncmd=set rank=3\ncmd=set debug=0\n",
        "cmd=initack rc=0 size=4 rank=3 debug=0 appnum=0\n",
    ] {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).unwrap();
            (&stream).write_all(answer.as_bytes()).unwrap();
            line
        });
        let asked = AskedPlace::ask(&address, 3).unwrap();
        assert_eq!((asked.rank, asked.world_size), (3, 4));
        assert_eq!(server.join().unwrap(), "cmd=initack pmiid=3\n");
        let other = Topology::new(2, 4).unwrap();
        let error = asked
            .share(&other, None, Instant::now() + SOON)
            .unwrap_err();
        assert!(error.is_topology(), "{error}");
    }
    let error = AskedPlace::ask("127.0.0.1:1", 0).err().unwrap();
    assert!(
        error.is_rendezvous() && error.to_string().contains("PMI_PORT"),
        "{error}"
    );
}
