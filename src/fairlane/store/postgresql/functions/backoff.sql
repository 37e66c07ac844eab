-- The delay before a retry.

-- The error in a back-off policy; NULL for a valid one. After a crash, a job whose policy cannot be read waits by the default
-- policy, and its next claim fails it.
CREATE FUNCTION fairlane.backoff_problem(p_backoff bytea) RETURNS text LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_policy jsonb;
    v_field text;
    v_value double precision;
BEGIN
    v_policy := convert_from(p_backoff, 'UTF8');
    IF jsonb_typeof(v_policy) <> 'object' THEN
        RETURN 'must be a JSON object';
    END IF;
    FOREACH v_field IN ARRAY ARRAY['base', 'factor', 'most'] LOOP
        IF coalesce(jsonb_typeof(v_policy -> v_field), 'number') <> 'number' THEN
            RETURN v_field || ' must be a number';
        END IF;
        v_value := v_policy ->> v_field;
        IF NOT (CASE v_field WHEN 'factor' THEN v_value BETWEEN 0.01 AND 100 ELSE v_value BETWEEN 0 AND 315360000 END) THEN
            RETURN format('%s is out of range: %s', v_field, v_value);
        END IF;
    END LOOP;
    RETURN CASE WHEN coalesce(jsonb_typeof(v_policy -> 'jitter'), 'boolean') <> 'boolean' THEN 'jitter must be true or false' END;
EXCEPTION WHEN data_exception THEN
    RETURN 'is not JSON';
END $$;

-- Seconds to wait after the `p_attempt`-th charged run: a random part of base * factor ^ (attempt - 1), capped at `most`; all
-- of it without jitter. A power outside the range of floats is either far above the cap or 0.
CREATE FUNCTION fairlane.backoff_delay(p_backoff bytea, p_attempt integer, p_draw double precision) RETURNS double precision
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_policy jsonb := CASE WHEN p_backoff IS NULL OR fairlane.backoff_problem(p_backoff) IS NOT NULL THEN '{}'
        ELSE convert_from(p_backoff, 'UTF8') END;
    v_base double precision := coalesce((v_policy ->> 'base')::double precision, 1.0);
    v_factor double precision := coalesce((v_policy ->> 'factor')::double precision, 2.0);
    v_most double precision := coalesce((v_policy ->> 'most')::double precision, 300.0);
    v_whole double precision := 0;
    v_power double precision := (p_attempt - 1) * ln(v_factor);
BEGIN
    IF v_base > 0 THEN
        v_whole := CASE WHEN v_power > 700 OR v_power + ln(v_base) > 700 THEN v_most
            WHEN v_power < -700 OR v_power + ln(v_base) < -700 THEN 0
            ELSE least(v_most, v_base * power(v_factor, p_attempt - 1)) END;
    END IF;
    RETURN CASE WHEN coalesce((v_policy ->> 'jitter')::boolean, true) THEN v_whole * p_draw ELSE v_whole END;
END $$;
