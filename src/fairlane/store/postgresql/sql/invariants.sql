-- Constraints that hold for every row of the hot tables. They are not part of the schema, because each costs as much as a
-- look-up in every statement; the tests of this package run with them.

-- name: invariants
ALTER TABLE fairlane.queue_count ADD CHECK (class BETWEEN CLASS.HIGH AND CLASS.LOW);
ALTER TABLE fairlane.job
    ADD CHECK (class BETWEEN CLASS.HIGH AND CLASS.LOW),
    ADD CHECK (kind BETWEEN KIND.JOB AND KIND.CLEANUP),
    ADD CHECK (cost > 0),
    ADD CHECK (retries >= 0);
ALTER TABLE fairlane.active_job
    ADD CHECK (class BETWEEN CLASS.HIGH AND CLASS.LOW),
    ADD CHECK (state BETWEEN STATE.ARRIVING AND STATE.RUNNING),
    ADD CHECK (gate BETWEEN GATE.NONE AND GATE.PARENT),
    ADD CHECK (flow IS NULL OR (state >= STATE.PENDING AND gate = GATE.NONE AND arrival IS NOT NULL)),
    ADD CHECK (session IS NULL OR state = STATE.RUNNING);
ALTER TABLE fairlane.outcome
    ADD CHECK (state BETWEEN STATE.COMPLETED AND STATE.CANCELLED),
    ADD CHECK ((session IS NULL) = (move IS NULL));
ALTER TABLE fairlane.lane_pace ADD CHECK ((tag IS NULL) = (head IS NULL));
ALTER TABLE fairlane.session_load ADD CHECK (least(running_high, running_normal, running_low) >= 0);
