//! Ranks that connect to one another, and what keeps them from it.

use super::*;

#[test]
fn ranks_connect_also_if_they_are_more_than_are_called_at_the_same_time() {
    let (ranks, deadline) = (40, in_time());
    let connecting: Vec<_> = meetings(1, ranks)
        .into_iter()
        .enumerate()
        .map(|(rank, meeting)| thread::spawn(move || mesh::connect(rank, &meeting, deadline)))
        .collect();
    for (rank, connecting) in connecting.into_iter().enumerate() {
        let streams = connecting.join().unwrap().unwrap();
        let missing: Vec<_> = (0..ranks).filter(|peer| streams[*peer].is_none()).collect();
        assert_eq!(missing, [rank]);
    }
}

#[test]
fn a_connection_that_the_peer_closes_is_made_again() {
    let mut meetings = meetings(1, 2);
    let (second, first) = (meetings.pop().unwrap(), meetings.pop().unwrap());
    let deadline = in_time();
    let connecting = thread::spawn(move || mesh::connect(1, &second, deadline));
    drop(first.listener.accept().unwrap());
    let streams = mesh::connect(0, &first, deadline).unwrap();
    assert!(streams[1].is_some());
    assert!(connecting.join().unwrap().unwrap()[0].is_some());
}

#[test]
fn a_rank_that_is_gone_is_named_long_before_the_deadline() {
    let mut meetings = meetings(1, 2);
    let second = meetings.pop().unwrap();
    drop(meetings);
    let deadline = Instant::now() + Duration::from_secs(1000);
    let error = mesh::connect(1, &second, deadline).unwrap_err();
    assert_eq!(error.ranks(), [0], "{error}");
    let text = error.to_string();
    assert!(
        text.contains("cannot connect to rank 0 (process 100 on here)"),
        "{text}"
    );
    assert!(text.contains("refused"), "{text}");
}

#[test]
fn ranks_that_are_silent_or_do_not_come_are_named_at_the_deadline() {
    let soon = Instant::now() + Duration::from_millis(300);
    let meetings = meetings(1, 3);
    // The system accepts the connection, and nobody answers.
    let silent = mesh::connect(1, &meetings[1], soon).unwrap_err();
    assert_eq!(silent.ranks(), [0], "{silent}");
    assert!(
        silent.to_string().contains("nothing came in time"),
        "{silent}"
    );
    let absent = mesh::connect(0, &meetings[0], soon).unwrap_err();
    assert_eq!(absent.ranks(), [1, 2], "{absent}");
    let text = absent.to_string();
    assert!(text.contains("but got no connection in time"), "{text}");
}

/// Strangers that connect to a rank neither get in nor keep the others out.
#[test]
fn strangers_do_not_disturb_the_mesh() {
    let mut own = meetings(1, 2);
    let (second, first) = (own.pop().unwrap(), own.pop().unwrap());
    let address = first.ranks[0].address;
    let stranger = Meeting {
        ranks: first.ranks.clone(),
        ..meetings(2, 2).remove(1)
    };
    let deadline = Instant::now() + Duration::from_secs(40);
    let silent = TcpStream::connect(address).unwrap();
    let mut loud = TcpStream::connect(address).unwrap();
    loud.write_all(b"SSH-2.0-scanner\r\n").unwrap();
    let host = thread::spawn(move || mesh::connect(0, &first, deadline).unwrap());
    let error = mesh::connect(1, &stranger, deadline).unwrap_err();
    assert!(
        error.to_string().contains("the proof of another job"),
        "{error}"
    );
    let streams = mesh::connect(1, &second, deadline).unwrap();
    assert!(streams[0].is_some() && streams[1].is_none());
    assert!(host.join().unwrap()[1].is_some());
    drop((silent, loud));
}

/// A generous deadline, which is there to end a hang.
fn in_time() -> Instant {
    Instant::now() + Duration::from_secs(60)
}
