//! Without a log subscriber, standard error shows what a rank waits for.

use std::{process::Command, time::Duration};

use accelerator_collective::{GroupOptions, Launch, ProcessGroup};

use crate::ports::RefusingAddress;

/// Runs as a process of its own, started by the test below.
#[test]
fn a_rank() {
    if std::env::var_os("RANK").is_none() {
        return;
    }
    let launch = Launch::from_env().unwrap();
    let options = GroupOptions::new().with_connect_timeout(Duration::from_secs(5));
    let error = ProcessGroup::connect(&launch, &options).unwrap_err();
    let expected = match launch.rendezvous.unwrap().host() {
        "127.0.0.1" => "could not be reached",
        host => &format!("the host of the store, {host:?}, has no known address"),
    };
    assert!(error.to_string().contains(expected), "{error}");
}

#[test]
fn a_store_that_is_not_there_is_told_before_the_rank_gives_up() {
    let nobody = RefusingAddress::take();
    let port = nobody.address().port();
    let rank = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "stderr_fallback::a_rank", "--nocapture"])
        .envs([("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")])
        .envs([("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")])
        .env("MASTER_PORT", port.to_string())
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&rank.stderr);
    assert!(rank.status.success(), "{told}");
    let expected = "accelerator: rank 1 has not reached the store at 127.0.0.1:";
    assert!(told.contains(expected), "{told}");
    assert!(told.contains("it gives up after 5 s"), "{told}");
}

#[test]
fn a_host_without_an_address_is_told_at_once() {
    let rank = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "stderr_fallback::a_rank", "--nocapture"])
        .envs([("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")])
        .envs([
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "no-such-host.invalid"),
        ])
        .env("MASTER_PORT", "29500")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&rank.stderr);
    assert!(rank.status.success(), "{told}");
    let expected = "accelerator: rank 1 finds no address of the store's host, \"no-such-host.invalid\" (MASTER_ADDR): ";
    assert_eq!(told.matches(expected).count(), 1, "{told}");
}
