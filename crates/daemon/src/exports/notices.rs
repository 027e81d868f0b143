//! Events at the sockets of exports, in the log and in counters.

use crate::events::EventName;
use crate::front_ends::{FrontEnds, LogRateLimit, count};
use cbd_vhost::Notice;
use std::sync::Arc;

/// An observer that logs and counts events at the vhost-user socket of a device.
pub(super) fn vhost_observer(device: String, front_ends: &Arc<FrontEnds>) -> cbd_vhost::Observer {
    let (front_ends, connected, refused) =
        (Arc::clone(front_ends), LogRateLimit::default(), LogRateLimit::default());
    let (failed, rings, disconnected) =
        (LogRateLimit::default(), LogRateLimit::default(), LogRateLimit::default());
    let migrating = LogRateLimit::default();
    let event = EventName::ExportClientFailed.name();
    Arc::new(move |notice| match notice {
        Notice::Connected => {
            connected.log(|more| tracing::info!(device, "a vhost-user front end connected{more}"));
        }
        Notice::Ended { error: None } => {
            disconnected.log(|more| tracing::info!(device, "the vhost-user front end disconnected{more}"));
        }
        Notice::Ended { error: Some(error) } => {
            count(&front_ends.counters.vhost_failed);
            failed.log(|more| tracing::warn!(device, event, "{error}{more}"));
        }
        Notice::Refused => {
            count(&front_ends.counters.vhost_refused);
            refused.log(|more| {
                let text = "a vhost-user front end was refused: another one is connected";
                tracing::warn!(device, event, "{text}{more}");
            });
        }
        Notice::DirtyLog { on } => migrating.log(|more| {
            let what =
                if *on { "begins to migrate its guest" } else { "does not migrate its guest any more" };
            tracing::info!(device, "the vhost-user front end {what}{more}");
        }),
        Notice::RingFailed { ring, error } => {
            count(&front_ends.counters.vhost_failed);
            rings.log(|more| {
                tracing::error!(
                    device,
                    ring,
                    event,
                    "a guest's ring is not served any more, until the guest resets its device: {error}{more}"
                );
            });
        }
        Notice::DeviceBusy => {
            count(&front_ends.counters.vhost_refused);
            refused.log(|more| {
                tracing::warn!(
                    device,
                    event,
                    "a vhost-user front end was refused: the backing device still has requests of the last one, which has disconnected; it may \
                     connect again when they are done{more}"
                );
            });
        }
        Notice::CannotAccept { error } => {
            count(&front_ends.counters.vhost_refused);
            refused.log(|more| tracing::error!(device, event, "{error}{more}"));
        }
        other => tracing::warn!(device, "{other:?}"),
    })
}

/// An observer that logs and counts events at the NBD socket of a device.
pub(super) fn nbd_observer(device: String, front_ends: &Arc<FrontEnds>) -> cbd_nbd::Observer {
    use cbd_nbd::Notice;
    let front_ends = Arc::clone(front_ends);
    let (refused, gave_way) = (LogRateLimit::default(), LogRateLimit::default());
    let (failed, waiting) = (LogRateLimit::default(), LogRateLimit::default());
    let event = EventName::ExportClientFailed.name();
    Arc::new(move |notice| {
        match notice {
        Notice::Connected { connection } => tracing::debug!(device, connection, "an NBD client connected"),
        Notice::Ended { connection, error: None } => {
            tracing::debug!(device, connection, "an NBD client disconnected");
        }
        Notice::Ended { connection, error: Some(error) } => {
            count(&front_ends.counters.nbd_failed);
            failed.log(|more| {
                tracing::warn!(device, connection, event, "the connection of an NBD client ended: {error}{more}");
            });
        }
        Notice::Refused { error } | Notice::CannotAccept { error } => {
            count(&front_ends.counters.nbd_refused);
            refused.log(|more| tracing::warn!(device, event, "an NBD client was refused: {error}{more}"));
        }
        Notice::HandshakeClosed { connection } => {
            count(&front_ends.counters.nbd_gave_way);
            gave_way.log(|more| {
                tracing::warn!(
                    device,
                    connection,
                    "an NBD client that had not finished its handshake was disconnected for newer ones{more}"
                );
            });
        }
        Notice::Waits { connection, clients } => waiting.log(|more| {
            tracing::warn!(
                device,
                connection,
                "an NBD client is not answered yet: the backing device still has requests of {clients} connections that have ended{more}"
            );
        }),
        Notice::Admitted { connection, waited } => tracing::info!(
            device,
            connection,
            "the NBD client is answered, after {:.1} s: the requests of ended connections are done",
            waited.as_secs_f64()
        ),
        other => tracing::warn!(device, "{other:?}"),
    }
    })
}
