//! Command lines that are understood, and those that are refused.

use super::*;
use clap::CommandFactory;

fn parse(line: &str) -> Result<Cli, clap::Error> {
    Cli::try_parse_from(std::iter::once("cbdctrl").chain(line.split_whitespace()))
}

fn wrong_usage(line: &str) {
    let error = parse(line).expect_err(line);
    assert_eq!(error.exit_code(), 2, "{line}");
}

#[test]
fn the_definitions_are_consistent() {
    Cli::command().debug_assert();
    DaemonCli::command().debug_assert();
}

#[test]
fn the_short_options_of_the_original_are_understood() {
    for line in [
        "tp-reg -H node0 -p /r -f -F",
        "tp-unreg -t 0",
        "tp-list",
        "host-list -t 1",
        "backend-start -t 0 -p /dev/sdb -c 4G -n 4 -D",
        "backend-stop -t 0 -b 1 -F",
        "backend-list -t 0 -a",
        "dev-start -t 0 -b 1",
        "dev-stop -t 0 -d 1",
        "backend-grow -t 0 -b 1",
        "dev-list -t 0 -a",
    ] {
        assert!(parse(line).is_ok(), "{line}");
    }
}

#[test]
fn the_long_options_of_the_original_are_understood() {
    for line in [
        "tp-reg --host node0 --path /r --format --force",
        "tp-unreg --transport 0",
        "backend-start --path /dev/sdb --cache-size 512MiB --handlers 128 --start-dev",
        "backend-stop --backend 1 --force",
        "backend-list --all",
        "dev-start --backend 1",
        "dev-stop --dev 1",
        "dev-list --all",
    ] {
        assert!(parse(line).is_ok(), "{line}");
    }
}

#[test]
fn data_crc_accepts_every_usual_word_for_true_and_false() {
    for (word, expected) in
        [("on", true), ("true", true), ("1", true), ("off", false), ("false", false), ("0", false)]
    {
        let parsed = parse(&format!("backend-start -p /d --data-crc {word}"));
        let Ok(Cli { command: Command::BackendStart { data_crc, .. }, .. }) = parsed else {
            panic!("{word}")
        };
        assert_eq!(data_crc, Some(expected), "{word}");
    }
}

#[test]
fn the_default_transport_is_0() {
    let Ok(Cli { command: Command::DevStart { on, .. }, .. }) = parse("dev-start -b 3") else {
        panic!("dev-start");
    };
    assert_eq!(on.transport, 0);
}

#[test]
fn wrong_usage_is_refused() {
    for line in [
        "",
        "tp-reg",
        "tp-reg -H node0",
        "tp-reg -p /r",
        "tp-reg -H node0 -p /r -F",
        "tp-reg -H node0 -p /r extra",
        "tp-unreg",
        "tp-unreg -t x",
        "tp-unreg -t -1",
        "backend-start -p /d -n 0",
        "backend-start -p /d -n 129",
        "backend-start -p /d -c lots",
        "backend-start -p /d -c -5",
        "backend-start -p /d --consistency maybe",
        "backend-start -p /d --data-crc perhaps",
        "backend-start -p /d -p /e",
        "backend-stop",
        "dev-start",
        "dev-stop -b 0",
        "backend-grow",
        "backend-grow -b 0 --size 8G",
        "set -b 0",
        "frobnicate",
        "status --timeout 0",
        "status --timeout soon",
    ] {
        wrong_usage(line);
    }
}

#[test]
fn commands_are_matched_whole() {
    for line in ["tp", "tp-l", "dev", "backend-st -b 0", "stat"] {
        wrong_usage(line);
    }
}

#[test]
fn a_value_of_set_may_begin_with_a_hyphen() {
    let Ok(Cli { command: Command::Set { changes, .. }, .. }) = parse("set -b 0 gc_percent=-1") else {
        panic!("set");
    };
    assert_eq!(changes, ["gc_percent=-1"]);
}

#[test]
fn an_option_after_the_changes_of_set_is_an_option() {
    let cli = parse("set -b 0 gc_percent=70 --json").expect("understood");
    assert!(cli.json && matches!(cli.command, Command::Set { changes, .. } if changes == ["gc_percent=70"]));
}
