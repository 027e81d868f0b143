//! Completions for shells: those that clap generates from [`crate::cli`], and numbers of objects, which the shell
//! requests from the daemon.
//!
//! Invariants: a completion waits at most a second for the daemon, and prints nothing if none responds.

use crate::cli::{Cli, DaemonCli, Numbers};
use cbd_daemon::api::Status;
use cbd_daemon::client::{Client, Timeout};
use clap::CommandFactory;
use clap_complete::Shell;
use std::path::Path;
use std::time::Duration;

/// Timeout of a request for a completion.
const TIMEOUT: Duration = Duration::from_secs(1);

/// The arguments of `set` that can be offered before the user types a value.
pub const SETTINGS: [&str; 43] = [
    "gc_percent=",
    "consistency=strict",
    "consistency=checkpoint",
    "consistency=none",
    "writeback_rate=auto",
    "writeback_percent=",
    "on_write_error=stop",
    "on_write_error=park",
    "write_error_after_s=",
    "writeback=on",
    "writeback=paused:",
    "read_latency_target_us=",
    "cache_mode=writeback",
    "cache_mode=writethrough",
    "cache_mode=writearound",
    "cache_mode=passthrough",
    "read_fill=admit",
    "read_fill=all",
    "read_fill=off",
    "sequential_read_cutoff=",
    "readahead=auto",
    "readahead=off",
    "sequential_write_cutoff=",
    "when_full=wait",
    "when_full=around",
    "congestion_read_us=",
    "congestion_write_us=",
    "pin_percent=",
    "metadata_min_percent=",
    "metadata_max_percent=",
    "scrub_every=",
    "scrub_window=",
    "scrub_rate=",
    "scrub_idle_only=yes",
    "scrub_idle_only=no",
    "offload=auto",
    "offload=on",
    "offload=never",
    "recovery_point_max_age=",
    "recovery_point_max_age=none",
    "class=none",
    "class=metadata",
    "name=",
];

/// The completions for a shell.
pub fn text(shell: Shell) -> String {
    let mut bytes = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "cbdctrl", &mut bytes);
    if shell == Shell::Bash || shell == Shell::Fish {
        clap_complete::generate(shell, &mut DaemonCli::command(), "cbdd", &mut bytes);
        clap_complete::generate(shell, &mut blkverify::cli::Cli::command(), "blkverify", &mut bytes);
    }
    let text = String::from_utf8_lossy(&bytes).into_owned();
    match shell {
        Shell::Bash => text + &BASH.replace("SETTINGS", &SETTINGS.join(" ")),
        Shell::Zsh => zsh(&text),
        Shell::Fish => fish(&text),
        _ => text,
    }
}

/// Offers numbers from the daemon where the number of an object is expected, and the settings.
const BASH: &str = r#"
_cbdctrl_with_numbers() {
    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" before="" kind="" transport=0 is_set="" word last=""
    for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
        case "$word" in
            check|dump|repair|rescue) _cbdctrl "$@"; return ;;
            set) is_set=1 ;;
        esac
        case "$last" in -t|--transport) transport="$word" ;; esac
        last="$word"
    done
    case "$prev" in
        -b|--backend) kind=backends ;;
        -d|--dev) kind=devices ;;
        -t|--transport) kind=transports ;;
    esac
    if [[ -n "$kind" ]]; then
        COMPREPLY=( $(compgen -W "$("$1" complete-numbers "$kind" -t "$transport" 2>/dev/null)" -- "$cur") )
        return
    fi
    if [[ -n "$is_set" && "$cur" != -* ]]; then
        # Bash takes NAME=VALUE for three words.
        [[ "$cur" == "=" ]] && { before="$prev="; cur=""; }
        [[ "$prev" == "=" ]] && before="${COMP_WORDS[COMP_CWORD-2]}="
        local settings=( $(compgen -W "SETTINGS" -- "$before$cur") )
        COMPREPLY=( "${settings[@]#"$before"}" )
        [[ "${COMPREPLY[*]}" == *= ]] && compopt -o nospace 2>/dev/null
        return
    fi
    _cbdctrl "$@"
}
complete -F _cbdctrl_with_numbers -o bashdefault -o default cbdctrl
"#;

/// The help texts of options that take the number of an object, and the kind of the object.
const NUMBERED: [(&str, &str); 3] = [
    ("Number of the transport", "transports"),
    ("Number or name of the backend", "backends"),
    ("Number or name of the block device", "devices"),
];

fn zsh(text: &str) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    for (help, kind) in NUMBERED {
        for line in lines.iter_mut().filter(|line| line.contains(&format!("[{help}"))) {
            *line = line.replace(":ID:_default", &format!(":ID:_cbdctrl_numbers {kind}"));
        }
    }
    let numbers = r#"
_cbdctrl_numbers() {
    compadd -- ${(f)"$(cbdctrl complete-numbers $argv[-1] 2>/dev/null)"}
}
"#;
    // After the first line, which names the command.
    lines.insert(1, numbers.to_owned());
    lines.join("\n") + "\n"
}

fn fish(text: &str) -> String {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    for (help, kind) in NUMBERED {
        for line in
            lines.iter_mut().filter(|line| line.contains(&format!("-d '{help}")) && line.ends_with(" -r"))
        {
            line.truncate(line.len() - " -r".len());
            line.push_str(&format!(" -x -a '(cbdctrl complete-numbers {kind} 2>/dev/null)'"));
        }
    }
    let settings = SETTINGS.join(" ");
    lines.push(format!(r#"complete -c cbdctrl -n "__fish_cbdctrl_using_subcommand set" -f -a "{settings}""#));
    lines.join("\n") + "\n"
}

/// The numbers and the names of the daemon's objects, one per line; empty if no daemon responds.
pub fn numbers(kind: Numbers, transport: u32, socket: &Path) -> String {
    let client = Client::new(socket).with_timeout(Timeout::Limit(TIMEOUT));
    client.status().map_or_else(|_| String::new(), |status| listed(kind, transport, &status))
}

fn listed(kind: Numbers, transport: u32, status: &Status) -> String {
    let on = || status.transports.iter().filter(|it| it.info.transport_id == transport);
    let backends = || on().flat_map(|it| &it.backends);
    let objects: Vec<(u32, Option<&String>)> = match kind {
        Numbers::Transports => status.transports.iter().map(|it| (it.info.transport_id, None)).collect(),
        Numbers::Backends => backends().map(|it| (it.info.backend_id, it.info.name.as_ref())).collect(),
        Numbers::Devices => {
            let remote = on().flat_map(|it| &it.remote_blkdevs).map(|it| &it.info);
            let all = backends().flat_map(|it| &it.info.blkdevs).chain(remote);
            all.map(|it| (it.blkdev_id, it.name.as_ref())).collect()
        }
    };
    let lines = objects.into_iter().map(|(number, name)| match name {
        Some(name) => format!("{number}\n{name}\n"),
        None => format!("{number}\n"),
    });
    lines.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    /// The completions that bash offers at the end of a line; the last word may be empty.
    fn offered(line: &[&str]) -> Vec<String> {
        let folder = tempfile::tempdir().unwrap();
        let (file, program) = (folder.path().join("completions"), folder.path().join("cbdctrl"));
        std::fs::write(&file, text(Shell::Bash)).unwrap();
        std::fs::write(&program, "#!/bin/sh\nshift\necho $1-$3-one $1-$3-two\n").unwrap();
        std::fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let script = r#"source "$1"; program=$2; shift 2; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
            COMP_WORDS[0]=$program
            _cbdctrl_with_numbers "$program" "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
            printf '%s\n' "${COMPREPLY[@]}""#;
        let mut command = Command::new("bash");
        command.args(["-c", script, "bash"]).arg(&file).arg(&program).args(line);
        let said = command.output().expect("bash");
        assert!(said.status.success() && said.stderr.is_empty(), "{said:?}");
        String::from_utf8_lossy(&said.stdout).lines().map(str::to_owned).collect()
    }

    #[test]
    fn bash_offers_the_numbers_that_the_daemon_has() {
        assert_eq!(offered(&["cbdctrl", "backend-stop", "-b", ""]), ["backends-0-one", "backends-0-two"]);
        assert_eq!(
            offered(&["cbdctrl", "dev-stop", "-t", "3", "--dev", "d"]),
            ["devices-3-one", "devices-3-two"]
        );
        assert_eq!(
            offered(&["cbdctrl", "drain", "--transport", "t"]),
            ["transports-0-one", "transports-0-two"]
        );
    }

    #[test]
    fn bash_offers_modes_and_exports() {
        assert_eq!(
            offered(&["cbdctrl", "backend-start", "--consistency", ""]),
            ["strict", "checkpoint", "none"]
        );
        assert_eq!(offered(&["cbdctrl", "backend-start", "--data-crc", ""]), ["on", "off"]);
        let exports = offered(&["cbdctrl", "dev-start", "-b", "0", "--export", ""]);
        assert!(
            exports.contains(&"fuse-loop".to_owned()) && exports.contains(&"vhost-user:".to_owned()),
            "{exports:?}"
        );
    }

    #[test]
    fn bash_offers_settings_and_their_values() {
        assert_eq!(offered(&["cbdctrl", "set", "-b", "0", "gc"]), ["gc_percent="]);
        assert_eq!(
            offered(&["cbdctrl", "set", "-b", "0", "consistency", "=", ""]),
            ["strict", "checkpoint", "none"]
        );
        assert_eq!(offered(&["cbdctrl", "set", "-b", "0", "on_write_error", "=", "p"]), ["park"]);
        assert_eq!(offered(&["cbdctrl", "set", "-b", "0", "on_write_error", "="]), ["stop", "park"]);
    }

    #[test]
    fn zsh_and_fish_request_numbers_from_the_daemon_too() {
        let zsh = text(Shell::Zsh);
        assert!(zsh.starts_with("#compdef cbdctrl\n") && zsh.contains("_cbdctrl_numbers backends"), "{zsh}");
        let fish = text(Shell::Fish);
        for part in
            ["complete-numbers devices", "complete-numbers transports", "gc_percent= consistency=strict"]
        {
            assert!(fish.contains(part), "{part} is missing");
        }
    }

    #[test]
    fn the_numbers_of_each_kind_come_from_the_status() {
        let backend = serde_json::json!({
            "backend_id": 4, "host_id": 0, "backend_path": "/d", "alive": true, "cache_segs": 0, "cache_gc_percent": 90,
            "cache_used_segs": 0, "sector": 512, "handlers": 1, "backing": "", "atomic_unit": 512, "cache": null,
            "name": "db",
            "blkdevs": [{ "blkdev_id": 7, "name": "disk", "host_id": 0, "backend_id": 4, "dev_name": "", "alive": true, "export": "auto" }],
        });
        let mut transport =
            serde_json::to_value(cbd_daemon::api::TransportInfo { transport_id: 2, ..Default::default() })
                .unwrap();
        transport["size"] = 0.into();
        transport["backends"] = serde_json::json!([backend]);
        let status = serde_json::json!({ "version": "1", "pid": 7, "uptime_s": 1, "warnings": [], "transports": [transport] });
        let status: Status = serde_json::from_value(status).unwrap();
        assert_eq!(listed(Numbers::Transports, 0, &status), "2\n");
        assert_eq!(listed(Numbers::Backends, 2, &status), "4\ndb\n");
        assert_eq!(listed(Numbers::Devices, 2, &status), "7\ndisk\n");
        assert_eq!(listed(Numbers::Devices, 0, &status), "");
    }
}
