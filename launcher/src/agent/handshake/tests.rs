//! Tests of the handshake, over connections on this machine.

use std::net::TcpListener;
use std::thread;

use super::*;
use crate::agent::line::{ConnectionKind, HostInfo};

const LIMIT: Duration = Duration::from_secs(20);

fn entry() -> JoinRequest {
    JoinRequest {
        hosts: 2,
        host: 1,
        purpose: ConnectionKind::Messages(HostInfo {
            name: "b".to_owned(),
            pid: 7,
            ranks: 3,
            job: None,
            max_restarts: None,
        }),
    }
}

/// Returns both ends of a connection, the head's last.
fn connection() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    (stream, listener.accept().unwrap().0)
}

/// Returns the results of both sides: the host that asks with `asking`, and the head that holds `held`.
fn meet(
    asking: Option<Token>,
    held: Option<Token>,
    verdict: Result<(), Refusal>,
) -> (Result<u64, Refusal>, Result<usize, Refusal>) {
    let (stream, head) = connection();
    let head = thread::spawn(move || {
        answer(&head, held.as_ref(), LIMIT, |entry| {
            verdict?;
            let welcome = JoinReply {
                session: 9,
                liveness: LIMIT,
                name: "a".to_owned(),
            };
            Ok((welcome, entry.host))
        })
    });
    let asked = ask(&stream, asking.as_ref(), &entry(), Instant::now() + LIMIT);
    (asked.map(|welcome| welcome.session), head.join().unwrap())
}

#[test]
fn one_token_on_both_sides_is_admitted_and_so_is_none() {
    let token = Token::generate().unwrap();
    let both = meet(Some(token.clone()), Some(token), Ok(()));
    assert_eq!(both, (Ok(9), Ok(1)));
    assert_eq!(meet(None, None, Ok(())), (Ok(9), Ok(1)));
}

#[test]
fn both_sides_learn_why_a_host_is_refused() {
    let other = || Some(Token::generate().unwrap());
    for (asking, held, says) in [
        (other(), other(), "different tokens"),
        (other(), None, "the other one does without"),
        (None, other(), "the other one does without"),
    ] {
        let (asked, answered) = meet(asking, held, Ok(()));
        for refusal in [asked.unwrap_err(), answered.unwrap_err()] {
            assert!(
                matches!(&refusal, Refusal::Permanent(text) if text.contains(says)),
                "{refusal:?}"
            );
        }
    }
    let refusal = Refusal::Permanent("host 1 is there".to_owned());
    let (asked, answered) = meet(None, None, Err(refusal.clone()));
    assert_eq!((asked, answered), (Err(refusal.clone()), Err(refusal)));
}

#[test]
fn another_version_is_named_on_both_sides() {
    let (stream, head) = connection();
    begin(&stream).unwrap();
    let hello = r#"{"protocol":7,"version":"9.9\u001b[2J","nonce":[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0],"proves_token":false,"more":1}"#;
    write_frame(&mut &stream, hello.as_bytes()).unwrap();
    let refusal = answer(&head, None, LIMIT, |_| -> Result<(JoinReply, ()), _> {
        panic!("it is not admitted")
    });
    let text = refusal.unwrap_err().text().to_owned();
    assert!(text.contains("accel-launch 9.9 (protocol 7)"), "{text}");
    check_magic(&stream, Instant::now() + LIMIT).unwrap();
    let told: FromHead = receive(&stream, Instant::now() + LIMIT).unwrap();
    let FromHead::Challenge(told) = told else {
        panic!("{told:?}");
    };
    assert_eq!((told.protocol, &*told.version), (PROTOCOL, VERSION));
    let text = check_version(7, "9.9\u{1b}[2J", "host 0").unwrap_err();
    assert!(
        text.contains("host 0 runs accel-launch 9.9 (protocol 7)"),
        "{text}"
    );
}

/// Any program that listens there can send any text.
#[test]
fn the_words_of_a_head_that_has_proved_nothing_are_not_shown() {
    let (stream, head) = connection();
    begin(&head).unwrap();
    send(
        &head,
        &FromHead::Refused(Refused::ever("your files are gone")),
    )
    .unwrap();
    let token = Token::generate().unwrap();
    let refusal = ask(&stream, Some(&token), &entry(), Instant::now() + LIMIT);
    assert_eq!(
        refusal.unwrap_err(),
        Refusal::Permanent(UNPROVED.to_owned())
    );
}

#[test]
fn a_peer_that_never_fits_is_told_apart_from_one_that_does_not_answer_yet() {
    for (sent, is_final) in [
        (&b"HTTP/1.1 400 Bad Request\r\n"[..], true),
        (b"acc", false),
    ] {
        let (stream, mut head) = connection();
        head.write_all(sent).unwrap();
        head.shutdown(std::net::Shutdown::Write).unwrap();
        let refusal = ask(&stream, None, &entry(), Instant::now() + LIMIT).unwrap_err();
        assert_eq!(
            matches!(refusal, Refusal::Permanent(_)),
            is_final,
            "{refusal:?}"
        );
        drop(head);
    }
}
